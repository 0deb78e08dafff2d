"""Reentrant activation checkpointing: the numbers of one process, or the sentence that says what to pass instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import run_each

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import FSDPStrategy, Strategy

DATA = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(5))


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


class Net(nn.Module):
    """One block, which runs `times` times."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.first, self.block, self.last, self.times = nn.Linear(6, 6), Block(), nn.Linear(6, 2), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=True)
        output: Tensor = self.last(x)
        return output


class LoRA(nn.Module):
    """A frozen block with an adapter beside it: the inputs are marked to require gradients, as peft does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block().requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def adapted(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x) + self.up(self.down(x))
        return output

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.adapted, x.requires_grad_(), use_reentrant=True)
        return output


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def preference(model: nn.Module, x: Tensor) -> Tensor:
    """Two forwards of one model, as in DPO."""
    return mean_square(model, x) - 0.1 * mean_square(model, -x)


Program = tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]
ONCE: tuple[Program, ...] = ((Net, mean_square), (LoRA, mean_square))
TWICE: dict[str, Program] = {
    "block": (partial(Net, times=2), mean_square),
    "model": (Net, preference),
    "adapter": (LoRA, preference),  # all that is trained runs twice
}
STRATEGIES = {
    "ddp": "ddp",
    "fsdp": FSDPStrategy(auto_wrap_policy={Block}),
    **{name: name for name in ("deepspeed_stage_2", "deepspeed_stage_3", "ddp_sharded", "ddp_fully_sharded")},
}


def train(fabric: Fabric, programs: tuple[Program, ...]) -> list[dict[str, Tensor]]:
    trained = []
    for make, loss_of in programs:
        torch.manual_seed(0)
        net = make()
        parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        model, optimizer = fabric.setup(net, torch.optim.SGD(parameters, lr=0.1))
        for batch in DATA:
            fabric.backward(loss_of(model, fabric.to_device(batch[fabric.global_rank :: fabric.world_size])))
            optimizer.step()
            optimizer.zero_grad()
        trained.append(fabric.state_dict(model))
    return trained


def train_each(world: World, strategy: str | Strategy) -> dict[str, Any]:
    """What each program trains to, or the error that it raises, each with a fabric of its own in the same ranks."""
    found: dict[str, Any] = {}
    for name, programs in {"once": ONCE, **{name: (program,) for name, program in TWICE.items()}}.items():
        options: Any = {"accelerator": ACCELERATOR, "devices": world.size, "sanitize": False}
        with Fabric(strategy=strategy, **options) as fabric:
            fabric.launch()
            try:
                found[name] = train(fabric, programs)
            except RuntimeError as error:
                found[name] = str(error)
    return found


@functools.cache
def trained_by_ranks() -> dict[str, list[dict[str, Any]]]:
    """By strategy, of each rank."""
    return dict(zip(STRATEGIES, run_each(2, train_each, [(each,) for each in STRATEGIES.values()]), strict=True))


@functools.cache
def trained_alone(twice: str | None = None) -> list[dict[str, Tensor]]:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        return fabric.launch(train, ONCE if twice is None else (TWICE[twice],))


@pytest.mark.parametrize("name", STRATEGIES)
def test_blocks_that_run_once_train_as_in_one_process(name: str) -> None:
    torch.testing.assert_close(trained_by_ranks()[name][0]["once"], trained_alone())


@pytest.mark.parametrize("twice", TWICE)
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_runs_twice_is_told_what_to_pass_instead(name: str, twice: str) -> None:
    first, second = (found[twice] for found in trained_by_ranks()[name])
    if (name, twice) in {("ddp_fully_sharded", "model"), ("ddp_fully_sharded", "adapter"), ("fsdp", "adapter")}:
        torch.testing.assert_close(first, trained_alone(twice))
    else:
        assert "`use_reentrant=False`" in first
        assert "`use_reentrant=False`" in second
