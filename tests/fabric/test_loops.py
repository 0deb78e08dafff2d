"""Loops as people write them: each step has the gradient of all samples that the ranks read for it, each read once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World

SIZE = 48


class Parts(IterableDataset[int]):
    """The numbers below `SIZE`; the first of two parts has a fifth of them."""

    def __init__(self, part: list[int] | None = None) -> None:
        self.part = list(range(SIZE)) if part is None else part

    def shard(self, num_shards: int, index: int) -> Parts:
        numbers = range(SIZE)
        return Parts([each for each in numbers if (each % 5 == 0) == (index == 0)] if num_shards == 2 else None)

    def __iter__(self) -> Iterator[int]:
        return iter(self.part)


def features(samples: Tensor) -> Tensor:
    return torch.stack([torch.sin(samples * factor) for factor in (1, 2, 3, 5)], 1).float()


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class Run:
    """One training; `steps`: the samples of this rank in each step."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.model, self.optimizer = fabric.setup(*parts())
        self.steps: list[list[int]] = []
        self.read: list[int] = []

    def loader(self, data: Any, *args: Any, use: Any = None, uneven: Any = None, **options: Any) -> Any:
        return self.fabric.setup_dataloaders(DataLoader(data, *args, **options), use=use, uneven=uneven)

    def backward(self, batch: Tensor, *, is_repeated: bool = False) -> None:
        self.read += [] if is_repeated else batch.tolist()
        self.fabric.backward(self.model(features(batch)).square().sum(), weight=len(batch))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append(self.read)
        self.read = []

    def train(self, batch: Tensor, *, is_repeated: bool = False) -> None:
        self.backward(batch, is_repeated=is_repeated)
        self.step()


def numbers() -> Any:
    return list(range(SIZE))


def nested(run: Run) -> None:
    outer, inner = run.loader(numbers(), 8), run.loader(numbers(), 4)
    for batch in outer:
        run.train(batch)
        for other in itertools.islice(inner, 2):
            run.train(other)


def zipped_with_a_cycle(run: Run) -> None:
    long, short = run.loader(numbers(), 4), run.loader(numbers()[:24], 4, shuffle=True)
    for batch, other in zip(long, itertools.cycle(short), strict=False):
        run.train(torch.cat([batch, other]))


def left_early(run: Run) -> None:
    loader = run.loader(numbers(), 4, shuffle=True)
    for _ in range(2):
        for number, batch in enumerate(loader):
            run.train(batch)
            if number == 1:
                break


def in_a_generator(run: Run) -> None:
    loader = run.loader(numbers(), 4, shuffle=True)

    def batches() -> Iterator[Tensor]:
        while True:
            yield from loader

    for batch in itertools.islice(batches(), 9):
        run.train(batch)


def evaluated_within_windows(run: Run) -> None:
    loader, validation = run.loader(numbers(), 4), run.loader(numbers()[:10], 3, use="validate")
    for window in run.fabric.accumulate(loader, 3):
        for batch in window:
            run.backward(batch)
            with torch.no_grad():
                outputs = [run.model(features(other)) for other in validation]
            assert len(run.fabric.gather_for_metrics(outputs, validation)) == 10
        run.step()


def buckets(run: Run) -> None:
    sizes = [0, *itertools.accumulate([3, 2, 5, 4, 1, 6, 2, 3, 4, 5, 3, 2, 6, 2])]
    for window in run.fabric.accumulate(
        run.loader(numbers(), batch_sampler=[list(range(*ends)) for ends in itertools.pairwise(sizes)]), 2
    ):
        for batch in window:
            run.backward(batch)
        run.step()


def weighted_sampling(run: Run) -> None:
    weights = [1.0 + number % 3 for number in range(SIZE)]
    sampler = WeightedRandomSampler(weights, 30, generator=torch.Generator().manual_seed(3))
    for batch in run.loader(numbers(), 4, sampler=sampler):
        run.train(batch)


def accumulated_by_hand(run: Run) -> None:
    for number, batch in enumerate(run.loader(numbers(), 4)):
        with run.fabric.no_backward_sync(run.model, enabled=number % 2 == 0):
            run.fabric.backward(run.model(features(batch)).square().mean() / 2)
        run.read += batch.tolist()
        if number % 2:
            run.step()


def uneven_stream(run: Run) -> None:
    loader, validation = run.loader(Parts(), 4, uneven="repeat"), run.loader(Parts(), 3, use="test", uneven="repeat")
    for _ in range(2):
        for batch in loader:
            with torch.no_grad():
                outputs = [run.model(features(other)) for other in validation]
            assert len(run.fabric.gather_for_metrics(outputs, validation)) == SIZE
            run.train(batch, is_repeated=loader.iteration.repeats)


LOOPS: list[tuple[Callable[[Run], None], int | None]] = [
    (nested, None),
    (zipped_with_a_cycle, None),
    (left_early, None),
    (in_a_generator, None),
    (evaluated_within_windows, 1),
    (buckets, 1),
    (weighted_sampling, None),
    (accumulated_by_hand, 1),
    (uneven_stream, 2),
]
"""With the number of epochs, where every sample is read in each."""


def train(world: World, strategy: str) -> list[tuple[list[list[int]], list[Tensor]]]:
    found = []
    for loop, _ in LOOPS:
        with Fabric(accelerator=ACCELERATOR, strategy=strategy, launcher="external") as fabric:
            fabric.launch()
            run = Run(fabric)
            loop(run)
            weights = fabric.state_dict(run.model, all_ranks=True)
            found.append((run.steps, [weight.clone() for weight in weights.values()]))
    return found


def alone(steps: list[list[int]]) -> list[Tensor]:
    model, optimizer = parts()
    for samples in steps:
        model(features(torch.tensor(samples))).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_2"])
def test_each_step_has_the_gradient_of_the_samples_that_all_ranks_read_for_it(strategy: str) -> None:
    ranks = run_world(2, train, strategy)
    for (loop, num_epochs), *found in zip(LOOPS, *ranks, strict=True):
        of_ranks = [steps for steps, _ in found]
        assert len({len(steps) for steps in of_ranks}) == 1, loop
        steps = [list(itertools.chain(*samples)) for samples in zip(*of_ranks, strict=True)]
        if num_epochs is not None:
            assert sorted(itertools.chain(*steps)) == sorted(list(range(SIZE)) * num_epochs), loop
        for _, weights in found:
            torch.testing.assert_close(weights, alone(steps), rtol=1e-5, atol=2e-6, msg=lambda m: f"{loop}: {m}")  # noqa: B023
