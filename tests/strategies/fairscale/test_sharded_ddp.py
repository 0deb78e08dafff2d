"""What FairScale's sharded data parallelism refuses, and what each rank keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from fabric import Fabric
from fabric.strategies.accelerators.cpu import CPUAccelerator
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator
from fabric.strategies.fairscale.sharded_ddp import FairScaleShardedStrategy
from fabric.strategies.target import Target

STRATEGY = FairScaleShardedStrategy(launcher="forkserver")


def sentence(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_it_runs_on_the_cpu_and_raises_on_devices_it_does_not_support() -> None:
    packages = STRATEGY.look_for_packages()
    assert STRATEGY.refuse(Target(accelerator=CPUAccelerator(), num_devices=2, packages=packages)) is None
    said = STRATEGY.refuse(Target(accelerator=TorchAccelerator("xpu"), packages=packages))
    assert said is not None
    assert "FairScale's, which runs on cpu and cuda, and not on 'xpu'. Pass `strategy='fsdp'`" in said


def mistakes(fabric: Fabric) -> dict[str, str]:
    said = {}
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other = fabric.setup(other)
    both = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    said["strangers"] = sentence(fabric.setup, model, both)
    said["twice"] = sentence(fabric.setup, model, SGD(model.parameters()), SGD([model.bias]))
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    said["dtypes"] = sentence(fabric.setup, mixed, SGD(mixed.parameters()))
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    said["late"] = sentence(fabric.setup_optimizers, SGD(model.parameters(), lr=0.1))
    said["alone"] = sentence(fabric.backward, other(torch.ones(1, 3)).sum())
    with torch.no_grad():
        said["evaluation"] = sentence(other, torch.ones(1, 3))
    fabric.backward(model(torch.ones(1, 3)).sum())
    model.requires_grad_(False)
    said["frozen"] = sentence(optimizer.step)
    model.requires_grad_(True)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    said["added"] = sentence(optimizer.step)
    optimizer.param_groups.pop()
    model.double()
    said["moved"] = sentence(optimizer.step)
    return said


@pytest.mark.slow
def test_mistakes_under_ddp_sharded_raise_with_what_to_write() -> None:
    said = Fabric(accelerator="cpu", strategy=STRATEGY, devices=2).launch(mistakes)
    assert said is not None
    assert "ValueError: `SGD` holds 2 parameters that are not of `Linear`" in said["strangers"]
    assert "ValueError: 1 parameters of `Linear` ('bias') are in two optimizers" in said["twice"]
    assert "ValueError: `SGD` holds parameters of torch.float32 and torch.float64" in said["dtypes"]
    assert "Make the optimizer first, and write `model, optimizer = fabric.setup(model, optimizer)`" in said["late"]
    assert "RuntimeError: This backward computed gradients of `Linear`, set up without an optimizer" in said["alone"]
    assert said["evaluation"] == "no error"
    assert "RuntimeError: `SGD` was given 1 parameters after `fabric.setup`, which no rank owns" in said["added"]
    assert "have gradients and are frozen in the step: FairScale would step on the rank that owns" in said["frozen"]
    assert "RuntimeError: 2 parameters of `Linear` ('weight', 'bias') were given another dtype" in said["moved"]


def shares(fabric: Fabric) -> Any:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model, optimizer = fabric.setup(model, AdamW(model.parameters()))
    fabric.backward(model(torch.ones(2, 4)).sum())
    gradients = [parameter.grad is not None for parameter in model.parameters()]
    optimizer.step()
    state = [parameter in optimizer.state for parameter in model.parameters()]
    held = sum(parameter.numel() for parameter in optimizer.state)
    return gradients == state, fabric.all_gather(torch.tensor(state)).sum(0).tolist(), held


@pytest.mark.slow
def test_each_parameter_has_its_gradient_and_its_state_on_one_rank() -> None:
    result = Fabric(accelerator="cpu", strategy=STRATEGY, devices=2).launch(shares)
    assert result is not None
    alike, owners, held = result
    assert alike
    assert owners == [1] * 8
    assert held == 4 * (16 + 4) / 2
