"""What exact numbers cost in a step on two ranks: weights, accumulation, agreement, positions, the guard, comparisons.

The target is 2 % of a step of 5 ms, 100 us. The step here is shorter, so that 100 us can be seen in it. The row
"control" is the same variant twice: a difference as small as its own means nothing.

Variants take turns in the same ranks, a few steps each. Beside the time by the clock stands that of the rank's
processor, in which waiting for the other rank does not count, and which other programs on the machine change less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import rivals
import torch
import torch.distributed as dist
from timing import Action, Row, in_order, limited, rows
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fabric import Fabric
from fabric.checks.sanitizer import Sanitizer, WatchedSteps

BATCH, WIDTH, LAYERS = 32, 64, 4
STEPS, WINDOW = 8, 4


class Endless(IterableDataset[torch.Tensor]):
    """The same batch again and again."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.ones(BATCH, WIDTH)
        while True:
            yield batch


def numbers(ours: Fabric) -> list[Row]:
    """Runs on both ranks; every rank measures, rank 0 reports."""
    rivals.quiet()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = ours.setup(net, torch.optim.SGD(net.parameters(), lr=1e-6))

    def steps(batches: Iterable[Any], weight: int | None = None) -> None:
        for inputs in islice(batches, STEPS):
            optimizer.zero_grad()
            ours.backward(model(inputs).square().mean(), weight=weight)
            optimizer.step()

    def divided(batches: Iterable[Any]) -> None:
        for inputs in islice(batches, STEPS):
            optimizer.zero_grad()
            ours.backward(model(inputs).square().mean())
            torch._foreach_mul_([p.grad for p in net.parameters() if p.grad is not None], 1 / BATCH)
            optimizer.step()

    def by_hand(batches: Iterable[Any]) -> None:
        for number, inputs in enumerate(islice(batches, STEPS), 1):
            with ours.no_backward_sync(model, enabled=number % WINDOW != 0):
                ours.backward(model(inputs).square().mean() / WINDOW)
            if number % WINDOW == 0:
                optimizer.step()
                optimizer.zero_grad()

    def accumulated(batches: Iterable[Any]) -> None:
        for window in ours.accumulate(islice(batches, STEPS), WINDOW):
            for inputs in window:
                ours.backward(model(inputs).square().mean() / WINDOW)
            optimizer.step()
            optimizer.zero_grad()

    def guarded(batches: Iterable[Any]) -> None:
        ours.guard_gradients("skip")
        steps(batches)
        ours.guard_gradients(None)

    def with_message(batches: Iterable[Any]) -> None:
        number = torch.zeros(1, dtype=torch.float64)
        for inputs in islice(batches, STEPS):
            optimizer.zero_grad()
            work = dist.all_reduce(number, async_op=True)
            ours.backward(model(inputs).square().mean())
            work.wait()
            optimizer.step()

    def with_awaited_message(batches: Iterable[Any]) -> None:
        number = torch.zeros(1, dtype=torch.float64)
        for inputs in islice(batches, STEPS):
            optimizer.zero_grad()
            dist.all_reduce(number)
            ours.backward(model(inputs).square().mean())
            optimizer.step()

    def watched(batches: Iterable[Any]) -> None:
        watch = next(check._watch for check in ours._connected.moments.checks if isinstance(check, Sanitizer))
        watch.watched, ours._connected.moments.due_at = WatchedSteps("always"), 0
        steps(batches)
        watch.watched = WatchedSteps(False)

    by_itself: Any = DataLoader(Endless(), batch_size=None)  # what a loop may depend on is not read ahead
    ahead: Any = DataLoader(Endless(), batch_size=1, collate_fn=lambda batches: batches[0])
    alone, ahead_alone = (
        iter(ours.setup_dataloaders(each, use_distributed_sampler=False)) for each in (by_itself, ahead)
    )
    agreed, ahead_agreed = (
        iter(ours.setup_dataloaders(each, use_distributed_sampler=False, uneven="stop")) for each in (by_itself, ahead)
    )
    with_workers, raw_workers = (DataLoader(Endless(), batch_size=None, num_workers=1) for _ in range(2))
    in_workers = iter(ours.setup_dataloaders(with_workers, use_distributed_sampler=False, uneven="repeat"))
    plain, whole = (DataLoader(torch.ones(BATCH * STEPS * size, WIDTH), BATCH) for size in (1, 2))  # type: ignore[arg-type]
    prepared = ours.setup_dataloaders(whole)
    races: dict[str, tuple[Action, Action]] = {
        "control": (partial(steps, alone), partial(steps, alone)),
        "raw all_reduce of 8 bytes": (partial(steps, alone), partial(with_message, alone)),
        "raw all_reduce of 8 bytes, awaited at once": (partial(steps, alone), partial(with_awaited_message, alone)),
        "weight=": (partial(steps, alone), partial(steps, alone, BATCH)),
        "raw division by hand": (partial(steps, alone), partial(divided, alone)),
        "weight= beside a division by hand": (partial(divided, alone), partial(steps, alone, BATCH)),
        "accumulate beside no_backward_sync": (partial(by_hand, alone), partial(accumulated, alone)),
        "agreement on uneven data": (partial(steps, ahead_alone), partial(steps, ahead_agreed)),
        "agreement, not read ahead": (partial(steps, alone), partial(steps, agreed)),
        "stream without workers": (partial(steps, by_itself), partial(steps, alone)),
        "stream with a worker, uneven='repeat'": (partial(steps, iter(raw_workers)), partial(steps, in_workers)),
        "loader with a state": (partial(steps, plain), partial(steps, prepared)),
        "sanitize='always'": (partial(steps, prepared), partial(watched, prepared)),
        "guard_gradients": (partial(steps, prepared), partial(guarded, prepared)),
    }
    return [row for name, (raw, own) in races.items() for row in _race(name, {"without": raw, "ours": own})]


def _race(name: str, variants: dict[str, Callable[[], object]], rounds: int = 150) -> list[Row]:
    of_clock: dict[str, list[float]] = {variant: [] for variant in variants}
    of_processor: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(limited(rounds) + 2):
        for variant, action in in_order(variants, turn):
            start, begun = time.perf_counter(), time.process_time()
            action()
            if turn > 1:
                of_clock[variant].append((time.perf_counter() - start) / STEPS * 1e6)
                of_processor[variant].append((time.process_time() - begun) / STEPS * 1e6)
    return [
        *rows(f"{name}: step of 2 DDP ranks", of_clock, "+100 us"),
        *rows(f"{name}: processor time", of_processor, "+100 us"),
    ]
