"""What FairScale's sharded data parallelism refuses, and what each rank keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD, AdamW

from fabric import Fabric
from fabric.strategies.accelerators.accelerator import CPUAccelerator
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.fairscale.sharded_ddp import FairScaleShardedStrategy

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
    reported = STRATEGY.refuse(Target(accelerator=TorchAccelerator("xpu"), packages=packages))
    assert reported is not None
    assert "FairScale's, which runs on cpu and cuda, and not on 'xpu'. Pass `strategy='fsdp'`" in reported


def mistakes(fabric: Fabric) -> dict[str, str]:
    reported = {}
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other = fabric.setup(other)
    both = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    reported["strangers"] = sentence(fabric.setup, model, both)
    reported["twice"] = sentence(fabric.setup, model, SGD(model.parameters()), SGD([model.bias]))
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    reported["dtypes"] = sentence(fabric.setup, mixed, SGD(mixed.parameters()))
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    reported["late"] = sentence(fabric.setup_optimizers, SGD(model.parameters(), lr=0.1))
    fabric.backward(model(other(torch.ones(1, 3))).sum())  # the other one has no optimizer, and is not trained
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    reported["added"] = sentence(optimizer.step)
    return reported


@pytest.mark.slow
def test_mistakes_under_ddp_sharded_raise_with_what_to_write() -> None:
    reported = Fabric(accelerator=ACCELERATOR, strategy=STRATEGY, devices=2).launch(mistakes)
    assert reported is not None
    assert "ValueError: `SGD` holds parameters that are not of `Linear`" in reported["strangers"]
    assert "ValueError: 1 parameters of `Linear` ('bias') are in two optimizers" in reported["twice"]
    assert "ValueError: `SGD` holds parameters of torch.float32 and torch.float64" in reported["dtypes"]
    assert "Make the optimizer first, and write `model, optimizer = fabric.setup(model, optimizer)`" in reported["late"]
    assert "RuntimeError: `SGD` was given parameters after `fabric.setup`, which no rank owns" in reported["added"]


def shares(fabric: Fabric) -> Any:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model, optimizer = fabric.setup(model, AdamW(model.parameters()))
    fabric.backward(model(torch.ones(2, 4)).sum())
    gradients = [type(parameter.grad) is torch.Tensor for parameter in model.parameters()]
    optimizer.step()
    state = [parameter in optimizer.state for parameter in model.parameters()]
    held = sum(parameter.numel() for parameter in optimizer.state)
    return gradients == state, fabric.all_gather(torch.tensor(state)).sum(0).tolist(), held


@pytest.mark.slow
def test_each_parameter_has_its_gradient_and_its_state_on_one_rank() -> None:
    result = Fabric(accelerator=ACCELERATOR, strategy=STRATEGY, devices=2).launch(shares)
    assert result is not None
    alike, owners, held = result
    assert alike
    assert owners == [1] * 8
    assert held == 4 * (16 + 4) / 2


def save_and_load(fabric: Fabric, path: str) -> tuple[list[int], list[int]]:
    """The parameters whose state each rank wrote, and those whose state a fresh optimizer has after loading."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    model, optimizer = fabric.setup(model, AdamW(model.parameters()))
    fabric.backward(model(torch.rand(2, 4)).sum())
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fresh = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    fresh, its_optimizer = fabric.setup(fresh, AdamW(fresh.parameters()))
    fabric.load(path, {"model": fresh, "optimizer": its_optimizer})
    pairs = ((model, optimizer), (fresh, its_optimizer))
    held = [[i for i, p in enumerate(net.parameters()) if p in one.state] for net, one in pairs]
    of_ranks = fabric.collective.all_gather_object(held)
    return [each[0] for each in of_ranks], [each[1] for each in of_ranks]


@pytest.mark.slow
def test_each_rank_saves_and_loads_the_state_of_its_own_parameters_alone(tmp_path: Path) -> None:
    found = Fabric(accelerator=ACCELERATOR, strategy="ddp_sharded", devices=2).launch(
        save_and_load, str(tmp_path / "saved")
    )
    assert found is not None
    before, after = found
    assert sorted(before[0] + before[1]) == [0, 1, 2, 3]
    assert after == before
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())["content"]["tensors"]
    for rank, held in enumerate(before):
        for index in held:
            pieces = manifest[f"/optimizer/state/{index}/exp_avg"]["pieces"]
            assert {piece[0].split(".")[1] for piece in pieces} == {str(rank)}
