"""Evaluations within `torch.inference_mode`: before the first step and between steps, they change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ManualStrategy, ModelParallelStrategy, Strategy


class Net(nn.Module):
    """Layers, a parameter of its own, and a method beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x)

    def score(self, x: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.first(x))) * self.scale).sum()


def shard(model: Any, mesh: Any) -> nn.Module:
    for part in (model.first, model):
        fully_shard(part, mesh=mesh["shard"])
    return model  # type: ignore[no-any-return]


def shard_by_hand(model: Any, context: Any) -> nn.Module:
    for part in (model.first, model):
        fully_shard(part)
    return model  # type: ignore[no-any-return]


STRATEGIES: dict[str, str | Strategy] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "units": FSDPStrategy(auto_wrap_policy={nn.Linear}),
    "hsdp": FSDPStrategy(device_mesh=(2, 1)),
    "model_parallel": ModelParallelStrategy(parallelize_fn=shard, shard=2),
    "manual": ManualStrategy(parallelize=shard_by_hand),
    "deepspeed_stage_3": "deepspeed_stage_3",
}


def train(fabric: Fabric, evaluates: bool, method: str) -> list[float]:
    """The losses; `evaluates`: before the first step, after each step, and twice in a row."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    if method != "forward":
        model.mark_forward_method(method)
    losses = []

    def evaluate() -> None:
        with torch.inference_mode():
            inputs = torch.ones(2, 4, device=fabric.device)
            for _ in range(2):
                found = model(inputs) if method == "forward" else getattr(model, method)(inputs)
            fabric.state_dict(net)
            assert torch.is_inference_mode_enabled()
            assert found.isfinite()
        assert torch.is_grad_enabled()

    for step in range(3):
        if evaluates:
            evaluate()
        loss = model(torch.linspace(-1, 1 + step, 8, device=fabric.device).view(2, 4)).square()
        fabric.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if evaluates:
        evaluate()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_evaluations_in_inference_mode_change_no_loss(name: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    expected = train(fabric, False, "forward")
    fabric.close()
    with Fabric(accelerator=ACCELERATOR, devices=2, strategy=STRATEGIES[name], launcher="forkserver") as fabric:
        assert fabric.launch(train, True, "forward") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "model_parallel"])
def test_a_marked_method_may_be_the_first_forward(name: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    expected = train(fabric, False, "forward")
    fabric.close()
    with Fabric(accelerator=ACCELERATOR, devices=2, strategy=STRATEGIES[name], launcher="forkserver") as fabric:
        assert fabric.launch(train, True, "score") == pytest.approx(expected, rel=1e-5)
