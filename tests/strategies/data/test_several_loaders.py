"""Several loaders of one loop: on several ranks each has the order that it has in one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from worlds import launch_each

from fabric import Fabric, WorkerError
from fabric.strategies import DDPStrategy

SIZE = 36
NUM_EPOCHS = 3


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def shuffled(batch_size: int, num_workers: int = 0) -> Any:
    return DataLoader(Numbers(), batch_size, shuffle=True, num_workers=num_workers)


def weighted(batch_size: int, num_workers: int = 0) -> Any:
    return DataLoader(Numbers(), batch_size, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE), num_workers=num_workers)


def in_order(batch_size: int, num_workers: int = 0) -> Any:
    return DataLoader(Numbers(), batch_size, num_workers=num_workers)


class Loop:
    """What differs between a loop over the ranks and one of plain PyTorch."""

    def __init__(self, fabric: Fabric | None, num_workers: int = 0) -> None:
        self.fabric, self.num_workers = fabric, num_workers
        self.epochs = range(2 if num_workers else NUM_EPOCHS)
        self.seen: list[list[int]] = []

    def prepare(self, make: Callable[..., Any], **use: Any) -> Any:
        """The loader, with six samples a step."""
        if self.fabric is None:
            return make(6, self.num_workers)
        return self.fabric.setup_dataloaders(make(6 // self.fabric.world_size, self.num_workers), **use)

    def whole(self, batch: torch.Tensor) -> list[int]:
        return batch.tolist() if self.fabric is None else self.fabric.all_gather(batch).flatten().tolist()  # type: ignore[no-any-return]

    def read(self, loader: Any) -> None:
        self.seen.append([sample for batch in loader for sample in self.whole(batch)])

    def read_together(self, *loaders: Any) -> None:
        for row in zip(*loaders, strict=True):
            self.seen += map(self.whole, row)


def in_turn(loop: Loop) -> None:
    first, second = loop.prepare(shuffled), loop.prepare(weighted)
    for _ in loop.epochs:
        loop.read(first), loop.read(second)


def zipped(loop: Loop) -> None:
    first, second, third = loop.prepare(shuffled), loop.prepare(shuffled), loop.prepare(in_order)
    for _ in loop.epochs:
        loop.read_together(first, third, second)


def evaluated(make: Callable[..., Any], loop: Loop, **use: Any) -> None:
    training, evaluation = loop.prepare(shuffled), loop.prepare(make, **use)
    for _ in loop.epochs:
        loop.read(training), loop.read(evaluation)


def evaluated_in_order(loop: Loop) -> None:
    evaluated(in_order, loop)


def evaluated_shuffled(loop: Loop) -> None:
    evaluated(shuffled, loop)


def evaluated_shuffled_alone(loop: Loop) -> None:
    evaluated(shuffled, loop, use="validate")


def evaluated_in_mid_epoch(loop: Loop) -> None:
    training, evaluation, test = loop.prepare(shuffled), loop.prepare(in_order, use="validate"), loop.prepare(in_order)
    for _ in loop.epochs:
        for number, batch in enumerate(training):
            loop.seen.append(loop.whole(batch))
            if number % 3 == 1:
                loop.read(evaluation)
        loop.read(test)


LOOPS = [in_turn, zipped, evaluated_in_order, evaluated_shuffled_alone, evaluated_shuffled, evaluated_in_mid_epoch]


def orders(fabric: Fabric | None, loops: list[Callable[[Loop], None]], num_workers: int) -> list[list[list[int]]]:
    found = []
    for each in loops:
        torch.manual_seed(7)
        loop = Loop(fabric, num_workers)
        each(loop)
        found.append(loop.seen)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "num_workers"), [(2, 0), (3, 0), pytest.param(2, 2, marks=pytest.mark.thorough)])
def test_loaders_that_are_kept_have_the_orders_of_one_process(devices: int, num_workers: int) -> None:
    loops = LOOPS[1:4] if num_workers else LOOPS
    expected = orders(None, loops, num_workers)
    assert all(expected[0][0] != other for other in expected[0][1:])
    assert launch_each(devices, orders, [("ddp", loops, num_workers)]) == [expected]


def alone(fabric: Fabric, makes: list[Callable[..., Any]]) -> list[list[int]]:
    """The orders of training, where rank 0 evaluates alone and looks at batches alone."""
    torch.manual_seed(7)
    loop = Loop(fabric)
    training, other = loop.prepare(shuffled), loop.prepare(weighted)
    evaluations = [loop.prepare(make, use="validate") for make in makes]
    if fabric.is_global_zero:
        next(iter(training))
    for _ in range(NUM_EPOCHS):
        for loader in (training, other):
            loop.read(loader)
            if fabric.is_global_zero:
                for evaluation in evaluations:
                    list(evaluation)
                next(iter(training))
            fabric.barrier()
    return loop.seen


def test_ranks_stay_together_where_rank_zero_evaluates_alone() -> None:
    for seen in launch_each(2, alone, [("ddp", [make, in_order]) for make in (in_order, shuffled)]):
        assert all(sorted(order) == list(range(SIZE)) for order in seen[::2])
        assert len(set(map(tuple, seen))) == len(seen)


def train(fabric: Fabric, path: str, make: Callable[..., Any], stop: int | None, is_resumed: bool) -> list[list[int]]:
    """The batches of two loaders of training and one of evaluation; of a run that saves, and stops after `stop` steps,
    or goes on from its file."""
    torch.manual_seed(8 if is_resumed else 7)
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loop = Loop(fabric)
    training = loop.prepare(shuffled), loop.prepare(weighted)
    evaluation = loop.prepare(make, use="validate")
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "phase": 0}
    if is_resumed:
        fabric.load(path, state)
    for epoch in range(state["epoch"], NUM_EPOCHS):
        for phase in range(state.pop("phase", 0), 2):
            for batch in training[phase]:
                loop.seen.append(loop.whole(batch))
                fabric.backward(model(batch[:, None].float()).sum())
                if len(loop.seen) == stop:
                    fabric.save(path, state | {"epoch": epoch, "phase": phase})
                    return loop.seen
        for batch in evaluation:
            loop.seen.append(loop.whole(batch))
    return loop.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "sizes"),
    [(2, (2, 1)), pytest.param(2, (3,), marks=pytest.mark.thorough), pytest.param(1, (2,), marks=pytest.mark.thorough)],
)
def test_a_run_with_several_loaders_is_resumed_in_the_middle(
    before: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    evaluations = (in_order, shuffled)
    cases = list(product(evaluations, (19, 29)))
    """Stopped in the second epoch: at the first batch of one loader, and at the fifth of the other."""

    def path(make: Callable[..., Any], stop: int) -> str:
        return str(tmp_path / f"{make.__name__} {stop}")

    def run(size: int, calls: list[tuple[Any, ...]]) -> list[list[list[int]]]:
        return launch_each(size, train, [("ddp", *call) for call in calls])

    whole = dict(zip(evaluations, run(1, [("", make, None, False) for make in evaluations]), strict=True))
    begun = run(before, [(path(*case), *case, False) for case in cases])
    for after in sizes:
        resumed = run(after, [(path(make, stop), make, None, True) for make, stop in cases])
        for (make, stop), first, rest in zip(cases, begun, resumed, strict=True):
            assert first + rest == whole[make], f"{make.__name__}, after {stop} steps, on {after} ranks"


def wait_for_rank_zero(fabric: Fabric) -> None:
    loop = Loop(fabric)
    training, _ = loop.prepare(shuffled), loop.prepare(in_order)
    if not fabric.is_global_zero:
        next(iter(training))


def test_a_rank_that_rank_zero_leaves_alone_says_what_it_waited_for() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=DDPStrategy(timeout_seconds=3), devices=2)
    with fabric, pytest.raises(WorkerError, match="has waited 3 s for rank 0 to begin the same epoch of a loader"):
        fabric.launch(wait_for_rank_zero)
