"""What a step costs in Python calls of the package's own frames, under every strategy that runs here, and that it does
not grow. Calls are counted and not timed, so that a busy machine changes nothing.

A limit is what was reached, rounded up: it may only be lowered.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from cProfile import Profile
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType

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
"""Ranks, and the most calls of a step, on average over as many as share a draw of batches."""
SAME = {
    "ddp_spawn": "ddp",
    "ddp_fork": "ddp",
    "ddp_notebook": "ddp",
    "ddp_sharded_spawn": "ddp_sharded",
    "deepspeed": "deepspeed_stage_2",
}
"""Those that differ from another one in how processes are started, or not at all."""

EARLY, LATE = 65, 130
COUNTED = 61
"""64 batches are drawn at a time. Each of these windows lies between two draws, and between steps that the sanitizer
watches; the step after the late one draws."""


@contextmanager
def counting(calls: Counter[str]) -> Iterator[None]:
    """Count Python calls of the package's frames, by name. A step calls thousands of frames of torch, so that a profile
    function in Python would take longer than the step."""
    profile = Profile(subcalls=False, builtins=False)
    with profile:
        yield
    found = {each.code: each.callcount for each in profile.getstats() if isinstance(each.code, CodeType)}
    files = {vars(module).get("__file__"): name for name, module in modules_of_the_package().items()}
    for code, number in found.items():
        if (module := files.get(code.co_filename) or generated().get(code)) is not None:
            calls[f"{module}.{code.co_name}"] += number


def modules_of_the_package() -> dict[str, ModuleType]:
    return {name: module for name, module in list(sys.modules.items()) if name.startswith("fabric.")}


@cache
def generated() -> dict[CodeType, str]:
    """Methods that dataclasses have written, which have no file, and their modules."""
    classes = [
        (name, kind)
        for name, module in modules_of_the_package().items()
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == name
    ]
    methods = [(name, each) for name, kind in classes for each in vars(kind).values() if isinstance(each, FunctionType)]
    return {each.__code__: name for name, each in methods if each.__code__.co_filename == "<string>"}


def train(
    fabric: Fabric, starts: Sequence[int], is_monitored: bool = False
) -> tuple[list[Counter[str]], list[int], Counter[str]]:
    """The calls of `COUNTED` steps after each of these numbers of steps, how many objects Python's collector knows
    then, and the calls of the step that follows the last of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    num_samples = 4 * (starts[-1] + COUNTED + 64) * fabric.world_size
    samples = TensorDataset(torch.randn(num_samples, 8), torch.randn(num_samples, 1))
    loader = iter(fabric.setup_dataloaders(DataLoader(samples, batch_size=4)))
    if is_monitored:
        fabric.monitor(window_steps=10_000, show=False)

    def step() -> None:
        x, y = next(loader)
        optimizer.zero_grad()
        fabric.backward((model(x) - y).square().mean())
        optimizer.step()

    def count(num_steps: int) -> Counter[str]:
        calls: Counter[str] = Counter()
        with counting(calls):
            for _ in range(num_steps):
                step()
        return calls

    done, windows, objects = 0, [], []
    for start in starts:
        for _ in range(start - done):
            step()
        windows.append(count(COUNTED))
        done = start + COUNTED
        gc.collect()
        objects.append(len(gc.get_objects()))
    return windows, objects, count(1)


def runs_the_same_frames(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Those that leave data in main memory run the frames of those that do not, and hsdp those of fsdp."""
    return (pytest.mark.thorough,) if name.endswith("_offload") or name == "hsdp" else ()


@pytest.mark.slow
@pytest.mark.parametrize("late", [LATE, pytest.param(LATE + 17 * 64, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=runs_the_same_frames(name)) for name in LIMITS])
def test_a_late_step_costs_what_an_early_one_did_and_no_more_than_its_limit(name: str, late: int) -> None:
    preload()
    size, limit = LIMITS[name]
    make = WITH_A_FUNCTION.get((name, size)) or partial(make_strategy, name)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=make(), launcher="forkserver")
    (early, calls), (early_objects, objects), drawing = fabric.launch(train, (EARLY, late))
    assert calls.total() <= early.total() + COUNTED, (calls - early).most_common(10)
    assert objects <= early_objects + (late - EARLY) // 10
    assert drawing.total() * COUNTED > calls.total(), "no batches were drawn"
    calls, num_steps = calls + drawing, COUNTED + 1
    assert calls.total() <= limit * num_steps, [(each, number / num_steps) for each, number in calls.most_common()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_a_step_with_a_monitor_makes_at_most_six_calls_more(name: str) -> None:
    preload()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=name, launcher="forkserver")
    (without, *_, drawing), (with_it, *_, with_drawing) = (fabric.launch(train, [LATE], on) for on in (False, True))
    calls, more = without[0] + drawing, with_it[0] + with_drawing
    assert 0 < more.total() - calls.total() <= 6 * (COUNTED + 1), (more - calls).most_common(10)


def test_every_strategy_that_runs_here_has_a_limit() -> None:
    names = {name for name, one in strategy_registrations().items() if one.source == "torchfabric"}
    assert names == {*LIMITS, *SAME, *NOT_ON_CPU}
    assert set(SAME.values()) < set(LIMITS)
