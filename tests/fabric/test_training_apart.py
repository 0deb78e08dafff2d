"""Programs whose ranks train apart: found by `check_replicas` where ranks hold the same weights, else by nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fabric import Fabric, WorkerError


def train(after: Callable[[Fabric, int, SGD, ReduceLROnPlateau], bool], fabric: Fabric) -> nn.Module:
    """`after`: called after each backward; whether to step."""
    model, optimizer = fabric.setup(*make())
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for step in range(12):
        fabric.backward(model(torch.full((2, 4), fabric.global_rank + 1.0)).sum())
        if after(fabric, step, optimizer, scheduler):
            optimizer.step()
            optimizer.zero_grad()
    return model


def make() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, SGD(model.parameters(), lr=0.1)


def by_the_loss_of_each_rank(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    scheduler.step(float(step * (2 * fabric.global_rank - 1)))  # falls on rank 0, and rises on rank 1
    return True


def by_the_loss_of_all_ranks(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    scheduler.step(float(fabric.all_reduce(float(step * fabric.global_rank))))
    return step % 3 == 2


def left_out_on_rank_one(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    return not (fabric.global_rank == 1 and step == 5)


@torch.no_grad()
def noise_of_each_rank(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return True


class ActNorm(nn.Module):
    """Takes its weights from its first batch, as flows do: under data parallelism, from that of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.has_weights = nn.Parameter(torch.zeros(4)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_weights:
            self.shift.data.copy_(-x.mean(0))
            self.has_weights = True
        return x + self.shift


def train_act_norm(fabric: Fabric) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), ActNorm())
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.randn(2, 4) + fabric.global_rank).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return model


PROGRAMS: dict[str, Callable[[Fabric], nn.Module]] = {
    "a scheduler stepped by the loss of each rank": partial(train, by_the_loss_of_each_rank),
    "a step left out on one rank": partial(train, left_out_on_rank_one),
    "noise that each rank draws": partial(train, noise_of_each_rank),
    "weights from each rank's first batch": train_act_norm,
}


def spread(fabric: Fabric, program: Callable[[Fabric], nn.Module]) -> float:
    """By how much weights differ over the ranks at the end."""
    gathered = [fabric.all_gather(weight.detach()) for weight in program(fabric).parameters()]
    return max(float((each - each[0]).abs().max()) for each in gathered)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_train_apart_in_silence_unless_replicas_are_checked(name: str) -> None:
    alone = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", launcher="forkserver")
    assert alone.launch(spread, PROGRAMS[name]) > 1e-3
    if name == "a step left out on one rank":  # which leaves the comparison out, too: the report of the hang names it
        return
    checked = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", launcher="forkserver", check_replicas=1)
    with pytest.raises(WorkerError, match="on rank 1 differs from that on rank 0"):
        checked.launch(spread, PROGRAMS[name])


@pytest.mark.slow
def test_a_scheduler_stepped_by_the_loss_of_all_ranks_leaves_them_equal() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp", launcher="forkserver", check_replicas=1)
    assert fabric.launch(spread, partial(train, by_the_loss_of_all_ranks)) == 0
