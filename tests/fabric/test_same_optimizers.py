"""Ranks whose optimizers differ hear of it, and those whose optimizers are equal do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fabric import Fabric
from fabric.launchers.supervision.failure import WorkerError


def train(fabric: Fabric, after: Callable[[Fabric, int, SGD, ReduceLROnPlateau], bool]) -> None:
    """`after`: called after each backward; whether to step."""
    model, optimizer = fabric.setup(*make())
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for step in range(12):
        fabric.backward(model(torch.full((2, 4), fabric.global_rank + 1.0)).sum())
        if after(fabric, step, optimizer, scheduler):
            optimizer.step()
            optimizer.zero_grad()


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


PROGRAMS: list[tuple[Any, str]] = [
    (by_the_loss_of_all_ranks, ""),
    (
        by_the_loss_of_each_rank,
        "since before the synchronised backward number 4: rank 0 has lr=0.1 of parameter group 0 of `SGD`, and rank 1 "
        "lr=0.001 of parameter group 0 of `SGD`",
    ),
    (left_out_on_rank_one, "backward number 8: rank 0 has 7 steps of `SGD`, and rank 1 6 steps of `SGD`"),
    (
        noise_of_each_rank,
        "The weights of rank 1 are not those of rank 0, since before the synchronised backward number 2",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed_stage_1", marks=pytest.mark.thorough)])
def test_what_one_rank_does_to_its_optimizer_or_weights_raises_and_what_all_do_does_not(strategy: str) -> None:
    for program, words in PROGRAMS[: 2 if strategy == "deepspeed_stage_1" else None]:
        if program is noise_of_each_rank and strategy == "fsdp":  # each shard gets the noise of its own part
            words = ""
        fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
        with pytest.raises(WorkerError, match=re.escape(words)) if words else nullcontext():
            fabric.launch(train, program)


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


def train_act_norm(fabric: Fabric) -> None:
    model = nn.Sequential(nn.Linear(4, 4), ActNorm())
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.randn(2, 4) + fabric.global_rank).square().sum())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded"])
def test_weights_that_a_rank_takes_from_its_first_batch_raise(strategy: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    with pytest.raises(WorkerError, match="The weights of rank 1 are not those of rank 0, since before the synchr"):
        fabric.launch(train_act_norm)
