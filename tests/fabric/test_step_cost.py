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
from typing import NamedTuple

import pytest
import torch
from rows import NOT_ON_CPU, WITH_A_FUNCTION
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import launch_each

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

READ, EARLY, LATE = 78, 33, 82
"""Batches that are read before the first step, more than one draw, and the steps after which others are counted."""
FEW, COUNTED, DRAWN = 16, 31, 64
"""How many steps are counted early, and late. `DRAWN` batches are drawn at a time. Each of these windows ends before a
draw, where as many batches are left of the last one, and lies between steps that the sanitizer watches, as 32, 64 and
128."""


@contextmanager
def counting(calls: Counter[str]) -> Iterator[None]:
    """Count Python calls of the package's frames, by name. A step calls thousands of frames of torch, so that a profile
    function in Python would take longer than the step."""
    profile = Profile(subcalls=False, builtins=False)
    with profile:
        yield
    found = {each.code: each.callcount for each in profile.getstats() if isinstance(each.code, CodeType)}
    modules = modules_of_the_package()
    files, written = {vars(module).get("__file__"): name for name, module in modules.items()}, generated(tuple(modules))
    for code, number in found.items():
        if (module := files.get(code.co_filename) or written.get(code)) is not None:
            calls[f"{module}.{code.co_name}"] += number


def modules_of_the_package() -> dict[str, ModuleType]:
    return {name: module for name, module in list(sys.modules.items()) if name.startswith("fabric.")}


@cache
def generated(modules: Sequence[str]) -> dict[CodeType, str]:
    """Methods that dataclasses have written, which have no file, and their modules."""
    classes = [
        (name, kind)
        for name in modules
        for kind in vars(sys.modules[name]).values()
        if isinstance(kind, type) and kind.__module__ == name
    ]
    methods = [(name, each) for name, kind in classes for each in vars(kind).values() if isinstance(each, FunctionType)]
    return {each.__code__: name for name, each in methods if each.__code__.co_filename == "<string>"}


class Window(NamedTuple):
    calls: Counter[str]
    """Of the steps that are counted."""
    num_objects: int
    """That Python's collector knows after them."""
    following: Counter[str]
    """Calls of the step after them."""


def train(fabric: Fabric, starts: Sequence[int], is_monitored: bool) -> list[Window]:
    """What the steps after each of these numbers of steps cost; of the last ones with a monitor, if `is_monitored`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    num_samples = 4 * (starts[-1] + 4 * DRAWN) * fabric.world_size  # none of the draws is the epoch's last
    samples = TensorDataset(torch.randn(num_samples, 8), torch.randn(num_samples, 1))
    loader = iter(fabric.setup_dataloaders(DataLoader(samples, batch_size=4)))

    for _ in range(READ):
        next(loader)

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

    done, windows = 0, []
    for start in starts:
        if is_monitored and start == starts[-1]:
            fabric.monitor(window_steps=10_000, show=False)
        for _ in range(start - done):
            step()
        num_counted = FEW if start == EARLY else COUNTED
        calls = count(num_counted)
        gc.collect()
        windows.append(Window(calls, len(gc.get_objects()), count(1)))
        done = start + num_counted + 1
    return windows


def windows_of(names: Sequence[str], late: int) -> dict[str, list[Window]]:
    """By strategy, and of those that are monitored one more. Strategies of as many ranks run in the same ones."""
    found = {}
    for size in {LIMITS[name][0] for name in names}:
        of_size = [name for name in names if LIMITS[name][0] == size]
        calls = []
        for name in of_size:
            make = WITH_A_FUNCTION.get((name, size)) or partial(make_strategy, name)
            starts = (EARLY, late, late + DRAWN) if name in MONITORED else (EARLY, late)
            calls.append((make(), starts, name in MONITORED))
        found.update(zip(of_size, launch_each(size, train, calls, accelerator="cpu"), strict=True))
    return found


MONITORED = ("ddp", "fsdp")
SAME_FRAMES = tuple(name for name in LIMITS if name.endswith("_offload") or name == "hsdp")
"""Those that leave data in main memory run the frames of those that do not, and hsdp those of fsdp."""
OWN_FRAMES = tuple(name for name in LIMITS if name not in SAME_FRAMES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("late", [LATE, pytest.param(LATE + 8 * DRAWN, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "names",
    [pytest.param(OWN_FRAMES, id="own"), pytest.param(SAME_FRAMES, id="same", marks=pytest.mark.thorough)],
)
def test_a_late_step_costs_what_an_early_one_did_and_no_more_than_its_limit(names: tuple[str, ...], late: int) -> None:
    """And one with a monitor at most six calls more."""
    for name, (early, at_last, *monitored) in windows_of(names, late).items():
        calls, drawing = at_last.calls, at_last.following
        assert calls.total() / COUNTED <= early.calls.total() / FEW + 1, (name, early.calls, calls.most_common(30))
        num_between = late + COUNTED - EARLY - FEW
        assert at_last.num_objects <= early.num_objects + num_between // 10 + 4, name  # a few are made once in between
        assert drawing.total() * COUNTED > calls.total(), f"{name}: no batches were drawn"
        of_a_step = [(each, number / COUNTED) for each, number in calls.most_common()]
        assert mean_calls(at_last) <= LIMITS[name][1], (name, of_a_step, drawing)
        assert len(monitored) == (name in MONITORED)
        for with_it in monitored:
            more = mean_calls(with_it) - mean_calls(at_last)
            assert 0 < more <= 6, (name, (with_it.calls - calls).most_common(10))


def mean_calls(window: Window) -> float:
    """The calls of a step, on average over as many as share a draw of batches."""
    return (window.calls.total() / COUNTED * (DRAWN - 1) + window.following.total()) / DRAWN


def test_every_strategy_that_runs_here_has_a_limit() -> None:
    names = {name for name, one in strategy_registrations().items() if one.source == "torchfabric"}
    assert names == {*LIMITS, *SAME, *NOT_ON_CPU}
    assert set(SAME.values()) < set(LIMITS)
