"""What a step costs in Python calls of the package's own frames, under every strategy that runs here, and that it does
not grow. Calls are counted and not timed, so that a busy machine changes nothing.

A limit is what was reached, rounded up: it may only be lowered.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from rows import NOT_ON_CPU, WITH_A_FUNCTION
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import preload

from fabric import Fabric
from fabric.strategies.strategy_registry import make_strategy, strategy_registrations

LIMITS = {
    "single_device": (1, 8),
    "dp": (1, 8),
    "ddp": (2, 14),
    "ddp_find_unused_parameters_true": (2, 17),
    "fsdp": (2, 46),
    "hsdp": (4, 46),
    "model_parallel": (2, 60),
    "manual": (2, 82),
    "ddp_sharded": (2, 39),
    "ddp_fully_sharded": (2, 75),
    "deepspeed_stage_1": (2, 30),
    "deepspeed_stage_2": (2, 45),
    "deepspeed_stage_3": (2, 58),
    "deepspeed_stage_1_offload": (2, 31),
    "deepspeed_stage_2_offload": (2, 46),
    "deepspeed_stage_3_offload": (2, 58),
}
"""Ranks, and the most calls of a step, on average over `COUNTED` steps."""
SAME = {
    "ddp_spawn": "ddp",
    "ddp_fork": "ddp",
    "ddp_notebook": "ddp",
    "ddp_sharded_spawn": "ddp_sharded",
    "deepspeed": "deepspeed_stage_2",
}
"""Those that differ from another one in how processes are started, or not at all."""

EARLY = 130
COUNTED = 64
"""As many batches are drawn at a time. None of these steps is watched by the sanitizer: it is no power of two, and none
of those after 258 or 1,200 is."""


@contextmanager
def counting(calls: Counter[str]) -> Iterator[None]:
    """Count Python calls of the package's frames, by name."""

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and (module := str(frame.f_globals.get("__name__"))).startswith("fabric."):
            calls[f"{module}.{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def train(fabric: Fabric, late: int, is_monitored: bool = False) -> list[tuple[Counter[str], int]]:
    """After `EARLY` steps, and after `late`: the calls of `COUNTED` steps, and how many objects Python's collector
    knows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    num_samples = 4 * (late + 2 * COUNTED) * fabric.world_size
    samples = TensorDataset(torch.randn(num_samples, 8), torch.randn(num_samples, 1))
    loader = iter(fabric.setup_dataloaders(DataLoader(samples, batch_size=4)))
    if is_monitored:
        fabric.monitor(window_steps=10_000, show=False)

    def step() -> None:
        x, y = next(loader)
        optimizer.zero_grad()
        fabric.backward((model(x) - y).square().mean())
        optimizer.step()

    found = []
    for num_steps in (EARLY, late - EARLY - COUNTED):
        calls: Counter[str] = Counter()
        for _ in range(num_steps):
            step()
        for _ in range(COUNTED):
            with counting(calls):
                step()
        gc.collect()
        found.append((calls, len(gc.get_objects())))
    return found


def runs_the_same_frames(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Those that leave data in main memory run the frames of those that do not, and hsdp those of fsdp."""
    return (pytest.mark.thorough,) if name.endswith("_offload") or name == "hsdp" else ()


@pytest.mark.slow
@pytest.mark.parametrize("late", [258, pytest.param(1200, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=runs_the_same_frames(name)) for name in LIMITS])
def test_a_late_step_costs_what_an_early_one_did_and_no_more_than_its_limit(name: str, late: int) -> None:
    preload()
    size, limit = LIMITS[name]
    make = WITH_A_FUNCTION.get((name, size)) or partial(make_strategy, name)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=make(), launcher="forkserver")
    (early, early_objects), (calls, objects) = fabric.launch(train, late)
    assert calls.total() <= early.total() + COUNTED, (calls - early).most_common(10)
    assert objects <= early_objects + (late - EARLY) // 10
    assert early.total() <= limit * COUNTED, [(each, number / COUNTED) for each, number in early.most_common()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_a_step_with_a_monitor_makes_at_most_six_calls_more(name: str) -> None:
    preload()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=name, launcher="forkserver")
    late = EARLY + COUNTED
    (without, _), (with_it, _) = (fabric.launch(train, late, is_on)[0] for is_on in (False, True))
    assert 0 < with_it.total() - without.total() <= 6 * COUNTED, (with_it - without).most_common(10)


def test_every_strategy_that_runs_here_has_a_limit() -> None:
    names = {name for name, one in strategy_registrations().items() if one.source == "torchfabric"}
    assert names == {*LIMITS, *SAME, *NOT_ON_CPU}
    assert set(SAME.values()) < set(LIMITS)
