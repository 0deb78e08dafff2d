"""Where `fully_shard` adds up gradients of the ranks, ranks that used different parameters of one part hear of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, Strategy

INPUT = torch.arange(16.0).reshape(4, 4).sin()
WINDOWS = [(0, 0, 1, 1), (0, 1, 0, 1)], [(0, 1, 0, 1), (1, 1, 0, 0)], [(0, 0, 0, 0), (1, 1, 1, 1)]
"""Which branch each of four samples takes, in windows of two micro-batches. Ranks, which have two samples each, differ
within the first two windows, and have used the same branches by the end of each."""


class Branches(nn.Module):
    """Two layers alike, of which each sample takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

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


def train(fabric: Fabric) -> tuple[list[float], list[str]]:
    """The losses of the windows, and the errors where ranks took different branches."""
    model, optimizer = fabric.setup(*make())
    mine = slice(2 * fabric.global_rank, 2 * fabric.global_rank + 2)
    losses, messages = [], []
    for epoch in range(2):
        for window in WINDOWS:
            for number, branches in enumerate(window):
                with fabric.no_backward_sync(model, enabled=number == 0):
                    loss = model(INPUT[mine], torch.tensor(branches)[mine])
                    fabric.backward(loss)
                losses.append(fabric.all_reduce(loss.detach()).item())
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            with pytest.raises(RuntimeError) as raised:
                fabric.backward(model(INPUT[mine], torch.tensor((0, 0, 1, 1))[mine]))
            messages.append(str(raised.value))
            optimizer.zero_grad()
    return losses, messages


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


@pytest.mark.parametrize(
    "strategy",
    [FSDPStrategy(), ModelParallelStrategy(parallelize_fn=at_once, shard=2)],
    ids=["fsdp", "model_parallel"],
)
def test_gradients_of_different_parameters_raise_and_training_goes_on_once_they_are_cleared(strategy: Strategy) -> None:
    losses, messages = Fabric(accelerator="cpu", strategy=strategy, devices=2).launch(train)
    assert losses == pytest.approx(plainly(), rel=1e-5)
    assert messages == [
        "Ranks computed gradients of different parameters of `Branches`, and `fully_shard` adds up gradients by their "
        "place among those that a rank has. The weights are unchanged; `optimizer.zero_grad()` discards the gradients. "
        "Use the same parameters on every rank, or pass `strategy='ddp_find_unused_parameters_true'`. Number 0 is "
        "'first.weight' on rank 0, and 'second.weight' on rank 1."
    ]
