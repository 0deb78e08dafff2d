"""What FairScale's fully sharded module refuses, and what each rank keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from fabric import Fabric
from fabric.strategies.accelerators.accelerator import CPUAccelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.fairscale.fsdp import FairScaleFSDPStrategy
from fabric.strategies.precision.precision import Precision

STRATEGY = FairScaleFSDPStrategy(launcher="forkserver")


def sentence(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_two(word: Any) -> Target:
    packages = STRATEGY.look_for_packages()
    return Target(accelerator=CPUAccelerator(), num_devices=2, precision=Precision.parse(word), packages=packages)


@pytest.mark.parametrize("word", ["64-true", "bf16-true"])
def test_unsupported_precisions_raise(word: Any) -> None:
    reported = STRATEGY.refuse(on_two(word))
    assert reported is not None
    assert f"`precision='{word}'` keeps parameters in torch." in reported
    assert STRATEGY.refuse(on_two("bf16-mixed")) is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)
        self.two.weight = self.one[0].weight


@dataclass
class Output:
    value: Tensor


class Custom(nn.Module):
    """Gives out an object of the user's, and computes a loss in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Output:
        return Output(self.linear(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).value.square().sum()


def mistakes(fabric: Fabric) -> dict[str, str]:
    reported = {}
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    reported["dtypes"] = sentence(fabric.setup, mixed)
    reported["tied"] = sentence(
        FairScaleFSDPStrategy(wrap=nn.Sequential).setup, fabric._connected.runtime, Tied(), [], True
    )
    reported["nothing"] = sentence(
        FairScaleFSDPStrategy(wrap=nn.Conv2d).setup, fabric._connected.runtime, Tied(), [], True
    )
    model = nn.Linear(3, 3)
    reported["adafactor"] = sentence(fabric.setup, model, torch.optim.Adafactor(model.parameters()))
    model = fabric.setup(nn.Linear(3, 3))
    reported["copy"] = sentence(copy.deepcopy, model)
    reported["load"] = sentence(model.load_state_dict, {"weight": torch.ones(2, 3), "bias": torch.ones(3)})
    return reported


@pytest.mark.slow
def test_mistakes_under_ddp_fully_sharded_raise_with_what_to_write() -> None:
    reported = Fabric(accelerator=ACCELERATOR, strategy=STRATEGY, devices=2).launch(mistakes)
    assert reported is not None
    assert "ValueError: '1.weight' of `Sequential` is of torch.float64" in reported["dtypes"]
    assert "`one.0.weight` and `two.weight` are one tied weight, but `wrap` puts them into" in reported["tied"]
    assert "ValueError: `wrap=Conv2d` matches no submodule of the `Tied`" in reported["nothing"]
    assert "cannot run `Adafactor`" in reported["adafactor"]
    assert "TypeError: A module under `strategy='ddp_fully_sharded'` cannot be copied or pickled" in reported["copy"]
    assert "'weight' is given as a whole tensor. Load it before `fabric.setup`" in reported["load"]


def slices(fabric: Fabric) -> dict[str, Any]:
    model = Custom()
    before = copy.deepcopy(model.state_dict())
    kept = model.linear.weight.detach()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(AdamW(model.parameters()))  # made from slices
    model.mark_forward_method("loss")
    fabric.backward(model.loss(torch.ones(1, 3)))
    optimizer.step()
    whole = fabric.state_dict(model, optimizer, all_ranks=True)[1]["state"][0]
    assert "this rank has only the state of the parameters that it steps" in sentence(optimizer.state_dict)
    return {
        "slice": tuple(model.linear.weight.shape),
        "state": tuple(optimizer.state[model.linear.weight]["exp_avg"].shape),
        "whole": tuple(whole["exp_avg"].shape),
        "part": tuple(model.linear.state_dict()["weight"].shape),
        "output": type(model(torch.ones(1, 3))).__name__,
        "alias": torch.equal(kept, before["linear.weight"]),
    }


@pytest.mark.slow
def test_each_rank_keeps_a_shard_and_returns_unsharded_tensors() -> None:
    found = Fabric(accelerator=ACCELERATOR, strategy=STRATEGY, devices=2).launch(slices)
    assert found == {
        "slice": (5,), "state": (5,), "whole": (3, 3), "part": (3, 3), "output": "Output", "alias": True,
    }  # fmt: skip


def leave_one_out(fabric: Fabric) -> str:
    """Each rank leaves out another part, of the same shape: FairScale would add up gradients of different ones."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model.forward = lambda x: model["ab"[fabric.global_rank]](x)  # type: ignore[method-assign]
    model, _ = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    return sentence(fabric.backward, model(torch.ones(1, 3)).sum())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_sharded", "ddp_fully_sharded"])
def test_ranks_that_leave_different_parameters_unused_raise(strategy: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2, launcher="forkserver", sanitize=False)
    reported = fabric.launch(leave_one_out)  # in a watched step the messages differ first
    assert reported is not None
    assert "RuntimeError: 2 parameters of `ModuleDict` ('b.weight', 'b.bias') got no gradient" in reported


def call_a_submodule(fabric: Fabric) -> tuple[str, Tensor, str]:
    torch.manual_seed(0)
    net = Custom()
    expected = net.linear(torch.ones(2, 3))
    model = fabric.setup(net)
    reported = sentence(lambda: model.linear(torch.ones(2, 3)))
    model.mark_forward_method("encode")
    difference = (model.encode(torch.ones(2, 3)) - expected).abs().max().detach()
    return reported, difference, sentence(lambda: model.linear(torch.ones(2, 3)))


def gradients(fabric: Fabric) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    model = fabric.setup(net)
    groups = [[each for each in model.parameters() if (each.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    by_shape = SGD([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}], lr=0.1)
    found = {"groups": sentence(fabric.setup_optimizers, by_shape)}
    optimizer = fabric.setup_optimizers(SGD(model.parameters(), lr=1.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fabric.backward(model(torch.ones(1, 3)).sum())
    gradient: Any = model.weight.grad
    found["norm"] = sentence(gradient.norm)
    found["clip"] = sentence(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    found["squares"] = sentence(lambda: (gradient**2).sum())
    found["wrong input"] = sentence(model, torch.ones(1, 5))  # leaves parameters and gradients as they are
    gradient.mul_(0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.25)
    optimizer.step()
    found["after the step"] = sentence(gradient.norm)
    found["differences"] = [(before[name] - value).unique() for name, value in model.state_dict().items()]
    return found


@pytest.mark.slow
def test_gradients_are_changed_by_element_and_what_reads_a_shard_as_a_whole_raises() -> None:
    found = Fabric(accelerator=ACCELERATOR, strategy=STRATEGY, devices=2).launch(gradients)
    assert "ValueError: `SGD` has a parameter group without parameters" in found["groups"]
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in found["wrong input"]
    for read in ("norm", "clip", "squares", "after the step"):
        assert "each rank has a shard of each gradient, and the result would be that of the shard" in found[read]
    for difference in found["differences"]:
        torch.testing.assert_close(difference, torch.full_like(difference, 0.25))


@pytest.mark.slow
def test_a_submodule_called_by_itself_says_which_method_to_mark() -> None:
    reported, difference, again = Fabric(accelerator=ACCELERATOR, devices=2, strategy=STRATEGY).launch(call_a_submodule)
    assert reported.startswith(
        "RuntimeError: `Linear` of `Custom` was called by itself, and `strategy='ddp_fully_sharded'`"
    )
    assert "write `model.mark_forward_method('name')` once after `setup`" in reported
    assert difference < 1e-6
    assert again == reported
