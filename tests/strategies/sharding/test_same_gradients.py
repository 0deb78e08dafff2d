"""Ranks may use different parameters of one unit of `fully_shard`: they train as one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, Strategy

INPUT = torch.arange(16.0).reshape(4, 4).sin()
WINDOWS = [[(0, 0, 1, 1)], [(0, 0, 1, 1), (0, 1, 0, 1)], [(0, 1, 0, 1), (1, 1, 0, 0)], [(0, 0, 0, 0)], [(1, 1, 0, 1)]]
"""Which branch each of four samples takes, in windows of micro-batches. Ranks have two samples each. In the fourth
window no rank uses the second branch, whose momentum is then left alone."""


class Branches(nn.Module):
    """Two branches of different sizes, of which each sample takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.second = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))

    def forward(self, x: Tensor, branch_of: Tensor) -> Tensor:
        hidden = torch.zeros_like(x)
        for number, branch in enumerate((self.first, self.second)):
            rows = (branch_of == number).nonzero()[:, 0]
            if len(rows):
                hidden = hidden.index_add(0, rows, branch(x[rows]))
        output: Tensor = self.head(hidden)
        return output.square().mean()


def make() -> tuple[Branches, SGD]:
    torch.manual_seed(0)
    model = Branches()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def at_once(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["shard"])


def train(fabric: Fabric) -> list[float]:
    """The losses of all backwards."""
    model, optimizer = fabric.setup(*make())
    mine = slice(2 * fabric.global_rank, 2 * fabric.global_rank + 2)
    losses = []
    for window in WINDOWS * 2:
        for number, branches in enumerate(window):
            with fabric.no_backward_sync(model, enabled=number < len(window) - 1):
                loss = model(INPUT[mine], torch.tensor(branches)[mine])
                fabric.backward(loss)
            losses.append(fabric.all_reduce(loss.detach()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plainly() -> list[float]:
    model, optimizer = make()
    losses = []
    for window in WINDOWS * 2:
        for branches in window:
            loss = model(INPUT, torch.tensor(branches))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="torch 2.13 can send zeros; before it, ranks raise",
)
@pytest.mark.parametrize(
    "strategy",
    [FSDPStrategy(), ModelParallelStrategy(parallelize_fn=at_once, shard=2)],
    ids=["fsdp", "model_parallel"],
)
def test_ranks_that_use_different_parameters_train_as_one_process(strategy: Strategy) -> None:
    assert Fabric(accelerator="cpu", strategy=strategy, devices=2).launch(train) == pytest.approx(plainly(), rel=1e-5)
