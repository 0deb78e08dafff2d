"""Ranks may use different parameters of one unit of `fully_shard`: they train as one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from devices import ACCELERATOR
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

SAME = [(0, 1, 0, 1), (0, 0, 0, 0), (0, 1, 1, 0)]
"""Which branch each sample takes, where both ranks use the same branches in each backward."""


class Branches(nn.Module):
    """Two branches, of which each sample takes one."""

    def __init__(self, *, are_alike: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4) if are_alike else nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, branch_of: Tensor) -> Tensor:
        hidden = torch.zeros_like(x)
        for number, branch in enumerate((self.first, self.second)):
            rows = (branch_of == number).nonzero()[:, 0]
            if len(rows):
                hidden = hidden.index_add(0, rows, branch(x[rows]))
        output: Tensor = self.head(hidden)
        return output.square().mean()


def make(*, are_alike: bool) -> tuple[Branches, SGD]:
    torch.manual_seed(0)
    model = Branches(are_alike=are_alike)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def at_once(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["shard"])


def train(fabric: Fabric) -> list[float]:
    """The losses of all backwards."""
    model, optimizer = fabric.setup(*make(are_alike=False))
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


def plainly(windows: Sequence[Sequence[tuple[int, ...]]], *, are_alike: bool) -> list[float]:
    model, optimizer = make(are_alike=are_alike)
    losses = []
    for window in windows:
        for branches in window:
            loss = model(INPUT, torch.tensor(branches))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
STRATEGIES = pytest.mark.parametrize(
    "strategy",
    [FSDPStrategy(), ModelParallelStrategy(parallelize_fn=at_once, shard=2)],
    ids=["fsdp", "model_parallel"],
)


@pytest.mark.skipif(not SENDS_ZEROS, reason="`make test` runs this: torch sends zeros from 2.13 on")
@STRATEGIES
def test_ranks_that_use_different_parameters_train_as_one_process(strategy: Strategy) -> None:
    assert Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2).launch(train) == pytest.approx(
        plainly(WINDOWS * 2, are_alike=False), rel=1e-5
    )


def differ_and_go_on(fabric: Fabric) -> tuple[list[float], str]:
    """The losses of windows at whose ends the ranks have used the same branches, after one in which they have not."""
    # Alike, because gloo aborts before the comparison if the gradients' sizes differ.
    model, optimizer = fabric.setup(*make(are_alike=True))
    mine = slice(2 * fabric.global_rank, 2 * fabric.global_rank + 2)

    def backward(branches: tuple[int, ...]) -> float:
        loss = model(INPUT[mine], torch.tensor(branches)[mine])
        fabric.backward(loss)
        return fabric.all_reduce(loss.detach()).item()

    with pytest.raises(RuntimeError) as raised:
        backward((0, 0, 1, 1))
    optimizer.zero_grad()
    losses = []
    for branches in SAME:
        losses.append(backward(branches))
        optimizer.step()
        optimizer.zero_grad()
    return losses, str(raised.value)


@pytest.mark.skipif(SENDS_ZEROS, reason="`make test-xla` runs this: torch before 2.13 cannot send zeros")
@STRATEGIES
def test_ranks_that_use_different_parameters_raise_and_training_goes_on_once_they_are_cleared(
    strategy: Strategy,
) -> None:
    losses, message = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2).launch(differ_and_go_on)
    assert losses == pytest.approx(plainly([[branches] for branches in SAME], are_alike=True), rel=1e-5)
    assert "Ranks computed gradients of different parameters of `Branches`" in message
    assert "The weights are unchanged; `optimizer.zero_grad()` discards the gradients." in message
    assert "Number 0 is 'first.weight' on rank 0, and 'second.weight' on rank 1." in message
