"""Ranks whose data has ended count zero in gradients, in every form of loop: equal to one process of plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World

LENGTHS = [7, 2, 4]
"""Batches of each rank."""


class Part(IterableDataset[Tensor]):
    """The samples of one rank, in batches of different sizes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        return (samples(self.rank, step) for step in range(LENGTHS[self.rank]))


def samples(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(1 + (rank + step) % 3, 4, generator=generator)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def weighted(fabric: Fabric, model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        fabric.backward(model(batch).square().sum(), weight=len(batch))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


def means(fabric: Fabric, model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        fabric.backward(model(batch).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


def windows(fabric: Fabric, model: Any, optimizer: Any, loader: Any) -> None:
    for window in fabric.accumulate(enumerate(loader), 3):
        for _, batch in window:
            fabric.backward(model(batch).square().sum(), weight=len(batch))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


def windows_of_means(fabric: Fabric, model: Any, optimizer: Any, loader: Any) -> None:
    for window in fabric.accumulate(loader, 3):
        for batch in window:
            fabric.backward(model(batch).square().mean() / 3)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


FORMS: list[tuple[Callable[..., None], int, bool]] = [
    (weighted, 1, True),
    (means, 1, False),
    (windows, 3, True),
    (windows_of_means, 3, False),
]


def alone(size: int, num_steps: int, has_weights: bool) -> list[Tensor]:
    """Two epochs of one process. A step without weights is the mean over the ranks that have a batch."""
    model, optimizer = parts()
    for _ in range(2):
        for start in range(0, max(LENGTHS[:size]), num_steps):
            steps = range(start, min(start + num_steps, max(LENGTHS[:size])))
            there = [[samples(rank, step) for rank in range(size) if step < LENGTHS[rank]] for step in steps]
            total = sum(len(batch) for batches in there for batch in batches)
            for batches in there:
                for batch in batches:
                    loss = model(batch).square()
                    (loss.sum() / total if has_weights else loss.mean() / len(batches) / num_steps).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def unsharded(fabric: Fabric, model: nn.Module) -> list[Tensor]:
    return list(fabric.state_dict(model, all_ranks=True).values())


def train_every_form(world: World, strategy: str) -> list[list[Tensor]]:
    found = []
    for form, _, _ in FORMS:
        with Fabric(accelerator=ACCELERATOR, strategy=strategy, launcher="external") as fabric:
            fabric.launch()
            part: Any = DataLoader(Part(fabric.global_rank), batch_size=None)
            loader = fabric.setup_dataloaders(part, use_distributed_sampler=False, uneven="repeat")
            model, optimizer = fabric.setup(*parts())
            for _ in range(2):
                form(fabric, model, optimizer, loader)
            found.append([each.clone() for each in unsharded(fabric, model)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_1", "deepspeed_stage_3"]
)
@pytest.mark.filterwarnings("ignore")
def test_ranks_whose_data_has_ended_count_zero_in_every_form_of_loop(strategy: str, size: int) -> None:
    for found in run_world(size, train_every_form, strategy):
        for (form, num_steps, has_weights), weights in zip(FORMS, found, strict=True):
            expected = alone(size, num_steps, has_weights)
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6, msg=lambda words: f"{form}: {words}")  # noqa: B023


def other_loops(world: World) -> list[str]:
    found = []

    def prefetched(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        batches = iter(loader)
        batch = next(batches)
        for following in batches:
            fabric.backward(model(batch).square().mean())
            batch = following

    def listed(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for batch in list(loader):
            fabric.backward(model(batch).square().mean())

    def zipped(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        more = fabric.setup_dataloaders([torch.ones(1, 4)] * 7, use_distributed_sampler=False)
        for batch, other in zip(loader, more, strict=True):
            fabric.backward(model(batch).square().mean() + model(other).mean())

    def plain(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for loop in (prefetched, listed, zipped, plain):
        with Fabric(accelerator=ACCELERATOR, strategy="ddp", launcher="external") as fabric:
            fabric.launch()
            part: Any = DataLoader(Part(fabric.global_rank), batch_size=None)
            model, optimizer = fabric.setup(*parts())
            loader = fabric.setup_dataloaders(part, use_distributed_sampler=False, uneven="repeat")
            try:
                loop(fabric, model, optimizer, loader)
                found.append("nothing")
            except RuntimeError as error:
                found.append(str(error))
            fabric.barrier()
    return found


@pytest.mark.slow
def test_loops_in_which_a_repeated_batch_would_count_raise_on_every_rank() -> None:
    first, second = run_world(2, other_loops)
    assert first == second
    for words in first[:3]:
        assert "received several batches before `fabric.backward`, some repeated and some not: it reads ahead" in words
    assert first[3].startswith("`SGD.step()` on batches that some ranks did not have: their data had ended, they repea")


def average_by_hand(world: World) -> list[Tensor]:
    found = []
    for has_weights in (True, False):
        with Fabric(accelerator=ACCELERATOR, strategy="ddp", launcher="external") as fabric:
            fabric.launch()
            part: Any = DataLoader(Part(fabric.global_rank), batch_size=None)
            model, optimizer = parts()
            for _ in range(2):
                for batch in fabric.setup_dataloaders(part, use_distributed_sampler=False, uneven="repeat"):
                    loss = model(batch).square()
                    (loss.sum() if has_weights else loss.mean()).backward()
                    fabric.average_gradients(model.parameters(), weight=len(batch) if has_weights else None)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            found += [parameter.detach() for parameter in model.parameters()]
    return found


@pytest.mark.slow
def test_ranks_whose_data_has_ended_count_zero_in_averages_by_hand() -> None:
    expected = alone(3, 1, True) + alone(3, 1, False)
    for found in run_world(3, average_by_hand):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def read_and_save(fabric: Fabric, model: Any, loader: Any, seen: list[float], path: str, stop: int) -> None:
    for step, batch in enumerate(loader, 1):
        if not loader.iteration.repeats:
            seen.append(float(batch.sum()))
        fabric.backward(model(batch).square().mean())
        if step == stop:
            fabric.save(path, {"loader": loader})
            break


def stop_and_go_on(world: World, folder: str) -> list[Any]:
    """For each kind of loader and each step to stop at: the own batches, and the repeated ones, of two epochs."""
    found = []
    for kind, stop in itertools.product((DataLoader, StatefulDataLoader), range(8)):
        seen: list[float] = []
        path = f"{folder}/{kind.__name__}-{stop}"
        for resumes in (False, True):
            with Fabric(accelerator=ACCELERATOR, strategy="ddp", launcher="external") as fabric:
                fabric.launch()
                part: Any = kind(Part(fabric.global_rank), batch_size=None)
                loader = fabric.setup_dataloaders(part, use_distributed_sampler=False, uneven="repeat")
                model, _ = fabric.setup(*parts())
                if resumes and stop:
                    fabric.load(path, {"loader": loader})
                    read_and_save(fabric, model, loader, seen, path, -1)
                read_and_save(fabric, model, loader, seen, path, -1 if resumes else stop)
        found.append(seen)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_run_that_stopped_while_some_ranks_had_no_data_reads_no_sample_twice(tmp_path: Path) -> None:
    for rank, found in enumerate(run_world(2, stop_and_go_on, str(tmp_path))):
        epoch = [float(samples(rank, step).sum()) for step in range(LENGTHS[rank])]
        for number, seen in enumerate(found):
            assert seen == pytest.approx(epoch * 2), f"kind {number // 8}, stopped at {number % 8}"
