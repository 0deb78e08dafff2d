"""torchdata's `StatefulDataLoader` over streams: a run that is stopped anywhere goes on as if it had not been."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Numbers(IterableDataset[Tensor]):
    """A stream without a state, which draws random numbers; each worker reads its part."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __iter__(self) -> Iterator[Tensor]:
        return self.numbers(0)

    def numbers(self, skipped: int) -> Iterator[Tensor]:
        worker = get_worker_info()
        begin, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(begin + skipped * step, self.length, step):
            yield torch.full((1,), float(self.first + number)) + 0.1 * torch.rand(1)


class Counting(Numbers):
    """The same, with a state."""

    def __init__(self, first: int, length: int) -> None:
        super().__init__(first, length)
        self.read = self.skipped = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.read, self.skipped = self.skipped, 0
        return self.counted()

    def counted(self) -> Iterator[Tensor]:
        for number in self.numbers(self.read):
            self.read += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["read"]


class CountingLate(Counting):
    """The same, which uses its state up at the first item."""

    def __iter__(self) -> Iterator[Tensor]:
        self.read, self.skipped = self.skipped, 0
        yield from self.counted()


def train(fabric: Fabric, data: Any, stops: list[tuple[int, int]], folder: str, **to: Any) -> Any:
    """Losses and batches of two epochs, in a run that is stopped after these batches of an epoch; 0: at its end."""
    seen = []
    for run, stop in enumerate([*stops, None]):
        fabric.seed_everything(1)
        net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1e-4))
        loader = fabric.setup_dataloaders(data, **to)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "place": [0, 0]}
        if run:
            fabric.load(f"{folder}/{run - 1}", state)
        epoch, step = state["place"]
        while epoch < 2 and (epoch, 0) != stop:
            for batch in loader:
                step += 1
                loss = model(batch).square().mean()
                seen.append((loss.item(), batch.flatten().tolist(), loader.iteration.repeats))
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if (epoch, step) == stop:
                    break
            else:
                epoch, step = epoch + 1, 0
                continue
            break
        if stop is not None:
            state["place"] = [epoch, step]
            fabric.save(f"{folder}/{run}", state)
    return seen


@pytest.mark.parametrize("kind", [Numbers, Counting])
@pytest.mark.parametrize("stops", [[(0, 1), (0, 3), (1, 2)], [(1, 0), (1, 1)]], ids=str)
def test_a_stream_stopped_twice_in_an_epoch_or_at_its_end_goes_on_exactly(
    kind: Any, stops: list[tuple[int, int]], tmp_path: Path
) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    whole = train(fabric, StatefulDataLoader(kind(0, 9), 2), [], "")
    assert train(fabric, StatefulDataLoader(kind(0, 9), 2), stops, str(tmp_path)) == whole
    assert len(whole) == 10


def own(seen: list[Any]) -> list[Any]:
    """Without the losses of repeated batches: a run that is resumed where a rank has no other repeats another one."""
    return [step if not step[2] else True for step in seen]


def on_two_ranks(world: World, folder: str, workers: int) -> list[Any]:
    found = []
    with Fabric(accelerator=ACCELERATOR, strategy="ddp", launcher="external", sanitize=False) as fabric:
        fabric.launch()
        for (make, kind), uneven in itertools.product(KINDS, ("stop", "repeat")):
            if kind is not Numbers and workers:  # torchdata does not restore the random generators of its workers
                continue
            dataset = kind(100 * fabric.global_rank, 8 + 8 * fabric.global_rank)
            to = {"use_distributed_sampler": False, "uneven": uneven}
            name = f"{folder}/{make.__name__}-{kind.__name__}-{uneven}"
            in_the_tail = [(0, 4), (0, 6), (0, 7)] if uneven == "repeat" else []  # rank 0 repeats from the 5th batch

            def run(stops: list[tuple[int, int]], to_folder: str) -> Any:
                return train(fabric, make(dataset, 2, num_workers=workers), stops, to_folder, **to)  # noqa: B023

            stopped = run([(0, 2), (0, 3), *in_the_tail, (1, 0)], name)
            found.append(((make.__name__, kind.__name__, uneven), run([], ""), stopped))
    return found


KINDS: list[tuple[Any, Any]] = [
    (StatefulDataLoader, Numbers),
    (StatefulDataLoader, Counting),
    (StatefulDataLoader, CountingLate),
    (DataLoader, Numbers),
]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_streams_of_different_lengths_go_on_exactly_with_workers_and_without(tmp_path: Path, workers: int) -> None:
    for rank, found in enumerate(run_world(2, on_two_ranks, str(tmp_path), workers)):
        for case, whole, stopped in found:
            assert len(whole) == (8 if case[2] == "stop" else 16), (rank, case)
            assert own(stopped) == own(whole), (rank, case)


class Plain(Counting):
    """A stream with a state, without random numbers: torchdata does not restore the generators of its workers."""

    def numbers(self, skipped: int) -> Iterator[Tensor]:
        for number in super().numbers(skipped):
            yield number.floor() / 1000


def with_workers_on_two_ranks(world: World, folder: str, uneven: str, how: dict[str, Any]) -> tuple[Any, Any]:
    with Fabric(accelerator=ACCELERATOR, strategy="ddp", launcher="external", sanitize=False) as fabric:
        fabric.launch()
        data = Plain(1000 * fabric.global_rank, 32 + 32 * fabric.global_rank)

        def run(stops: list[tuple[int, int]], to_folder: str) -> Any:
            loader = StatefulDataLoader(data, 2, **how)
            return train(fabric, loader, stops, to_folder, use_distributed_sampler=False, uneven=uneven)

        in_the_tail = [(0, 16), (0, 23)] if uneven == "repeat" else []
        stops = [(0, 5), (0, 8), (0, 13), (0, 15), *in_the_tail, (1, 0), (1, 9), *([(1, 17)] if in_the_tail else [])]
        return run([], ""), run(stops, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uneven", "how"),
    [
        ("repeat", {"num_workers": 1, "snapshot_every_n_steps": 7}),
        pytest.param("stop", {"num_workers": 1}, marks=pytest.mark.thorough),
        pytest.param("repeat", {"num_workers": 2, "persistent_workers": True}, marks=pytest.mark.thorough),
    ],
)
def test_a_run_over_a_loader_with_workers_goes_on_after_the_batch_of_its_loop(
    uneven: str, how: dict[str, Any], tmp_path: Path
) -> None:
    for whole, stopped in run_world(2, with_workers_on_two_ranks, str(tmp_path), uneven, how):
        assert len(whole) == 2 * (32 if uneven == "repeat" else 16)
        assert own(stopped) == own(whole)


class OfKnownLength(Counting):
    def __len__(self) -> int:
        return self.length


def test_a_window_over_a_loader_that_resumes_itself_does_not_guess_its_length() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        fabric.setup(nn.Linear(1, 1))
        loader, resumed = (fabric.setup_dataloaders(StatefulDataLoader(OfKnownLength(0, 7))) for _ in range(2))
        batches = iter(loader)
        next(batches), next(batches)
        resumed.load_state_dict(loader.state_dict())
        [window] = [window for window in fabric.accumulate(resumed, 6) if list(window)]
        assert window.num_read == 5
        with pytest.raises(TypeError, match="has resumed an epoch by a state of its own"):
            len(window)
