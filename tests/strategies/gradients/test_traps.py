"""What other libraries got wrong about gradients, over every strategy that this machine can run.

Rows G5, G7 and G8 of the project's list of traps. Each loop is one function, run twice: plain in this process on the
whole batch, and with a fabric on every rank on its share. One launch runs them all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from fabric import Fabric, read_checkpoint
from fabric.strategies import DDPStrategy, ManualStrategy, ModelParallelStrategy, Strategy
from fabric.strategies.accelerators.accelerator import CPUAccelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.manual.strategy import ManualContext, Parallelized
from fabric.strategies.strategy_registry import available_strategies, make_strategy


def in_shards(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["shard"])


def in_replicas(model: nn.Module, context: ManualContext) -> Parallelized:
    return Parallelized(module=model, averaged=model)


WITH_OPTIONS: dict[str, Strategy] = {
    "ddp in shards": DDPStrategy(shard_optimizer=True),
    "manual": ManualStrategy(parallelize=in_replicas),
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard=2),
}
"""Those that need more than a name."""
BY_OTHER_LAUNCHERS = ("ddp_fork", "ddp_notebook", "ddp_spawn", "ddp_sharded_spawn", "xla", "xla_fsdp")
"""Strategies of this list whose ranks come to be in another way; and those of XLA, which have tests of their own."""


FIRST = ("single_device", "dp", "ddp", "fsdp", "ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_2")
"""One of each technique; the others are left to `make check`."""


def rows() -> list[tuple[str, Strategy, int]]:
    """What can run here, on two ranks where it can."""
    found = []
    for name in {**dict.fromkeys(available_strategies()), **WITH_OPTIONS}:
        if name not in BY_OTHER_LAUNCHERS:
            strategy = WITH_OPTIONS.get(name) or make_strategy(name)
            here = Target(accelerator=CPUAccelerator(), packages=strategy.look_for_packages())
            refusals = [strategy.refuse(replace(here, num_devices=size)) for size in (2, 1)]
            if None in refusals:
                found.append((name, strategy, 2 - refusals.index(None)))
    return found


def launch(strategy: Strategy, size: int, *what: Any) -> Any:
    launcher = "forkserver" if "forkserver" in strategy.launchers else "auto"
    return Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=size, launcher=launcher).launch(*what)


class Plain:
    """What a fabric offers a loop, in one process."""

    world_size, global_rank = 1, 0

    def setup(self, *objects: Any) -> Any:
        return objects

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def no_backward_sync(self, model: nn.Module, enabled: bool = True) -> Any:
        return nullcontext()

    def clip_gradients(self, model: nn.Module, optimizer: Optimizer, **how: Any) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), **how)


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(tools: Any, model: nn.Module, step: int) -> Tensor:
    """Over this rank's rows of a batch of eight."""
    drawn = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(step))
    x_bd, y_bd = drawn.to(next(model.parameters()).device)
    rows = slice(tools.global_rank, None, tools.world_size)
    return nn.functional.mse_loss(model(x_bd[rows]), y_bd[rows, :3])


def synchronisation_is_as_before_after_no_backward_sync(tools: Any, parts: dict[str, Any]) -> None:
    """G5: `no_backward_sync(enabled=False)` left the synchronisation off for good."""
    model = make(1)
    model, optimizer = tools.setup(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        with tools.no_backward_sync(model, enabled=False):
            tools.backward(loss_of(tools, model, 10 * step), model=model)
        tools.backward(loss_of(tools, model, 10 * step + 1), model=model)  # synchronised
        with tools.no_backward_sync(model):
            with tools.no_backward_sync(model, enabled=False), tools.no_backward_sync(model):
                tools.backward(loss_of(tools, model, 10 * step + 2), model=model)
            tools.backward(loss_of(tools, model, 10 * step + 3), model=model)  # within the outer one, still
        with pytest.raises(KeyError), tools.no_backward_sync(model):
            raise KeyError
        with tools.no_backward_sync(model, enabled=False) if step % 2 else nullcontext():
            tools.backward(loss_of(tools, model, 10 * step + 4), model=model)  # synchronised either way
        optimizer.step()
        optimizer.zero_grad()
    parts["model"] = model


def a_norm_that_is_not_finite_raises_unless_it_may(tools: Any, parts: dict[str, Any]) -> None:
    """G7: `error_if_nonfinite` was ignored, and so was clipping as a whole."""
    model = make(2)
    model, optimizer = tools.setup(model, AdamW(model.parameters(), lr=0.05, eps=1e-3))
    norms = []
    for step in range(3):
        broken = float("nan") if tools.global_rank == tools.world_size - 1 else 1.0  # on one rank alone
        tools.backward(loss_of(tools, model, step) * broken, model=model)
        with pytest.raises(RuntimeError):
            tools.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=True)
        free = tools.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False)
        assert free.isnan(), free
        optimizer.zero_grad()
        tools.backward(loss_of(tools, model, step), model=model)
        norms.append(float(tools.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=True)))
        optimizer.step()
        optimizer.zero_grad()
    parts["model"], parts["norms"] = model, norms


def two_models_and_two_optimizers_take_turns(tools: Any, parts: dict[str, Any]) -> None:
    """G8: a second model, or a second optimizer, was refused under DeepSpeed."""
    first, second = make(3), make(4)
    first, of_first = tools.setup(first, SGD(first.parameters(), lr=0.1, momentum=0.9))
    second, of_second = tools.setup(second, AdamW(second.parameters(), lr=0.05, eps=1e-3))
    for step in range(4):
        of_first_alone, of_second_alone = loss_of(tools, first, step), loss_of(tools, second, 20 + step)
        tools.backward(of_second_alone, model=second)
        tools.backward(of_first_alone, model=first)
        of_first.step()
        of_first.zero_grad()
        if step % 2:  # a window of two for the other
            of_second.step()
            of_second.zero_grad()
    parts["first"], parts["second"] = first, second


LOOPS: tuple[Callable[[Any, dict[str, Any]], None], ...] = (
    synchronisation_is_as_before_after_no_backward_sync,
    a_norm_that_is_not_finite_raises_unless_it_may,
    two_models_and_two_optimizers_take_turns,
)


def run_all(fabric: Fabric, folder: str) -> None:
    for loop in LOOPS:
        parts: dict[str, Any] = {}
        loop(fabric, parts)
        fabric.save(f"{folder}/{loop.__name__}", parts)


def plain(loop: Callable[[Any, dict[str, Any]], None]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    loop(Plain(), parts)
    return {name: dict(part.state_dict()) if isinstance(part, nn.Module) else part for name, part in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "size"),
    [pytest.param(*row, marks=[] if row[0] in FIRST else [pytest.mark.thorough]) for row in rows()],
    ids=lambda value: str(value).split("(")[0],
)
def test_gradients_of_accumulation_clipping_and_several_models_are_those_of_plain_pytorch(
    name: str, strategy: Strategy, size: int, tmp_path: Path
) -> None:
    launch(strategy, size, run_all, str(tmp_path))
    for loop in LOOPS:
        expected = plain(loop)
        torch.testing.assert_close(
            read_checkpoint(tmp_path / loop.__name__, list(expected)),
            expected,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda message, loop=loop: f"{name}, {loop.__doc__}: {message}",
        )
