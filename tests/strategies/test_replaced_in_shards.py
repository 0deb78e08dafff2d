"""A parameter that is replaced after `setup` is not lost in silence where `fully_shard` exchanges the objects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies.fsdp.strategy import FSDPStrategy
from fabric.strategies.model_parallel.strategy import ModelParallelStrategy
from fabric.strategies.strategy import Strategy


class Half(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def in_shards(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["shard"])


def assign(head: nn.Linear) -> None:
    head.weight = nn.Parameter(torch.zeros(1, 3))


def register(head: nn.Linear) -> None:
    head.register_parameter("weight", nn.Parameter(torch.zeros(1, 3)))


def halve(head: nn.Linear) -> None:
    parametrize.register_parametrization(head, "weight", Half(), unsafe=True)


def message_after(
    fabric: Fabric, replace: Callable[[nn.Linear], None], num_steps: int, without_gradients: bool
) -> tuple[str, bool]:
    """What the first forward after a replacement raises, and whether the loss before it changed with the weights."""
    head = nn.Linear(3, 1)
    model = nn.Sequential(nn.Linear(2, 3), head)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    batch, losses = torch.ones(4, 2), []
    for _ in range(num_steps):
        loss = model(batch).sum()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(batch).sum().item())
    replace(head)
    try:
        with torch.set_grad_enabled(not without_gradients):
            model(batch)
    except RuntimeError as error:
        return str(error), len(set(losses)) == num_steps
    return "no error", False


@pytest.mark.slow
@pytest.mark.parametrize("without_gradients", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("replace", [assign, register, halve])
@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(),
        FSDPStrategy(auto_wrap_policy={nn.Linear}),
        ModelParallelStrategy(parallelize_fn=in_shards, shard="auto"),
    ],
    ids=["root", "layers", "model_parallel"],
)
def test_a_parameter_replaced_after_setup_raises_by_its_name(
    strategy: Strategy, replace: Callable[[nn.Linear], None], num_steps: int, without_gradients: bool
) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    reported, has_trained = fabric.launch(message_after, replace, num_steps, without_gradients)
    assert "'1.weight'" in reported
    assert "were replaced after `fabric.setup`" in reported
    assert has_trained
