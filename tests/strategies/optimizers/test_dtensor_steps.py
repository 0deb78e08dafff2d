"""Optimizers whose groups have both DTensors and plain parameters: by foreach, which accelerators default to, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW, Optimizer

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy
from fabric.strategies.tensors.dtensor import whole


def make(**options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    return model, AdamW(model.parameters(), lr=0.05, **options)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """All but the norm."""
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def train(model: nn.Module, optimizer: Optimizer, backward: Any, num_steps: int = 3) -> list[Tensor]:
    device = next(model.parameters()).device
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
        backward((model(inputs) * torch.arange(8.0, device=device)).square().mean())
        optimizer.step()
    return [whole(parameter).detach().cpu() for parameter in model.parameters()]


def run(fabric: Fabric) -> list[Any]:
    """The weights with `foreach` left out and written; what it is in the groups, after setup and after a load."""
    model, optimizer = fabric.setup(*make())
    foreach = [optimizer.param_groups[0]["foreach"]]
    found: list[Any] = [train(model, optimizer, fabric.backward)]
    state = optimizer.state_dict()
    state["param_groups"][0]["foreach"] = None  # as in a checkpoint of one process
    optimizer.load_state_dict(state)
    foreach.append(optimizer.param_groups[0]["foreach"])
    later = fabric.setup_optimizers(AdamW(fabric.setup(make()[0]).parameters()))
    foreach.append(later.param_groups[0]["foreach"])
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        model, optimizer = fabric.setup(*make(**options))
        found.append(train(model, optimizer, fabric.backward))
        foreach.append({name: optimizer.param_groups[0][name] for name in options})
    return [*found, foreach]


@pytest.mark.slow
def test_a_group_of_dtensors_and_plain_parameters_is_stepped_one_by_one_and_keeps_what_the_user_wrote() -> None:
    strategy = ModelParallelStrategy(parallelize_fn=parallelize, tensor=2)
    found = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy).launch(run)
    assert found is not None
    *of_each, foreach = found
    for weights in of_each:
        torch.testing.assert_close(weights, train(*make(), Tensor.backward), rtol=1e-5, atol=1e-6)
    assert foreach == [None, None, None, {"foreach": True}, {"fused": True}, {"foreach": False}]
