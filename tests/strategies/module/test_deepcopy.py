"""Copies and pickles of a prepared model, where the case "copies" of `fabric.testing` says nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from fabric import Fabric
from fabric.strategies import FSDPStrategy
from fabric.strategies.module.deepcopy import Hook
from fabric.strategies.module.forward import ForwardPath


def twice(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 2 * nn.Linear.forward(self, x)


def unchanged(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"]
)
def test_a_copy_can_be_prepared_and_released(duplicate: Callable[[nn.Module], Any]) -> None:
    linear = nn.Linear(2, 1)
    calls: list[str] = []
    ForwardPath(linear, unchanged)
    linear.register_forward_pre_hook(Hook(lambda *_: calls.append("ours")))
    other = duplicate(linear)
    path = ForwardPath(other, unchanged)
    assert not other._forward_pre_hooks
    other(torch.ones(1, 2))
    assert calls == []
    path.release()
    assert "mark_forward_method" not in vars(other)
    assert other.forward == nn.Linear.forward.__get__(other)


def test_a_forward_of_the_instance_belongs_to_the_copy() -> None:
    linear = nn.Linear(2, 1, bias=False)
    linear.forward = MethodType(twice, linear)  # type: ignore[method-assign]
    ForwardPath(linear, unchanged)
    other = copy.deepcopy(linear)
    nn.init.ones_(other.weight)
    assert other(torch.ones(1, 2)).item() == 4.0  # the instance's forward, the copy's weight
    ForwardPath(other, unchanged)
    assert other(torch.ones(1, 2)).item() == 4.0


def test_a_module_that_delegates_its_forward_runs_the_prepared_module() -> None:
    linear, seen = nn.Linear(2, 1), []
    ForwardPath(linear, lambda function, args, kwargs: seen.append(function) or function(*args, **kwargs))
    outer = nn.Linear(2, 1)
    outer.forward = linear.forward  # type: ignore[method-assign]
    assert torch.equal(outer(torch.ones(1, 2)), linear(torch.ones(1, 2)))
    assert len(seen) == 2


def averages(fabric: Fabric) -> list[float]:
    """What the error advises under `fsdp`: the distance of the averages from those of plain PyTorch."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    plain, x = copy.deepcopy(net), torch.ones(2, 3)
    expected, optimizer = AveragedModel(plain), SGD(plain.parameters(), lr=0.1)
    average = fabric.setup_module(AveragedModel(net))
    target = fabric.setup_module(copy.deepcopy(net))
    model, sharded_optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        fabric.backward(model(x).square().sum())
        plain(x).square().sum().backward()
        for each in (sharded_optimizer, optimizer):
            each.step()
            each.zero_grad()
        average.update_parameters(model)
        expected.update_parameters(plain)
    target.load_state_dict(model.state_dict())
    for refused in (copy.deepcopy, pickle.dumps, AveragedModel):
        with pytest.raises(RuntimeError, match=r"`\w*Sequential`: A prepared module whose parameters are sharded"):
            refused(model)
    with torch.no_grad():
        return [(average(x) - expected(x)).abs().max().item(), (target(x) - plain(x)).abs().max().item()]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, {nn.Linear}], ids=["root", "parts"])
def test_what_the_error_for_sharded_models_advises_gives_the_averages_of_plain_pytorch(policy: Any) -> None:
    strategy = FSDPStrategy(auto_wrap_policy=policy)
    found = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver").launch(averages)
    assert found == pytest.approx([0.0, 0.0], abs=1e-6)


def pickled(fabric: Fabric) -> bool:
    """Whether a copy of a model in an engine can be pickled, and the model itself raises."""
    net = nn.Linear(3, 2)
    model, _ = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(model)
    loaded = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    return torch.equal(loaded(torch.ones(1, 3)), model(torch.ones(1, 3)))


@pytest.mark.slow
def test_a_copy_of_a_model_in_an_engine_of_deepspeed_can_be_pickled() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="deepspeed_stage_2", launcher="forkserver")
    assert fabric.launch(pickled)
