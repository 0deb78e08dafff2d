"""Gradients that are kept in shards are zeroed as in plain PyTorch, whoever zeroes them, and whenever."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies.deepspeed.strategy import DeepSpeedStrategy
from fabric.strategies.fairscale.fsdp import FairScaleFSDPStrategy
from fabric.strategies.fairscale.sharded_ddp import FairScaleShardedStrategy
from fabric.strategies.fsdp.strategy import FSDPStrategy
from fabric.strategies.strategy import Strategy


class Net(nn.Module):
    """Two layers; one with a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Plain:
    """The words of a fabric, in one process of plain PyTorch."""

    world_size, global_rank = 1, 0

    def setup(self, *objects: Any) -> Any:
        return objects

    def backward(self, loss: Tensor, **_: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def no_backward_sync(self, model: nn.Module) -> Any:
        return nullcontext()

    def clip_gradients(self, model: nn.Module, optimizer: SGD, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


WAYS = {
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "submodule": lambda model, optimizer: model.first.zero_grad(),
    "submodule, to zero": lambda model, optimizer: model.second.zero_grad(set_to_none=False),
    "every parameter": lambda model, optimizer: [setattr(each, "grad", None) for each in model.parameters()],
    "every parameter, to zero": lambda model, optimizer: [
        each.grad.zero_() for each in model.parameters() if each.grad is not None
    ],
    "one parameter": lambda model, optimizer: setattr(model.second.bias, "grad", None),
    "both": lambda model, optimizer: (model.first.zero_grad(), model.zero_grad(set_to_none=False)),
}


IN_PART = ("submodule", "submodule, to zero", "one parameter")


def loss_of(fabric: Any, model: nn.Module, number: int) -> Tensor:
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    share = whole.chunk(fabric.world_size)[fabric.global_rank]
    return (model(share) - number).square().mean()


def zeroed_in_every_way(fabric: Any, leave_out: Sequence[str] = ()) -> dict[str, Tensor]:
    """For each way to zero gradients a step, with it before a forward and between forward and backward; outputs."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.02, momentum=0.5))
    found = {}
    for number, (way, zero_grad) in enumerate(WAYS.items()):
        if way in leave_out:
            continue
        for clipped in (False, True):
            fabric.backward(loss_of(fabric, model, 4 * number))
            zero_grad(model, optimizer)
            fabric.backward(loss_of(fabric, model, 4 * number + 1))
            loss = loss_of(fabric, model, 4 * number + 2)
            zero_grad(model, optimizer)
            fabric.backward(loss)
            fabric.backward(loss_of(fabric, model, 4 * number + 3))
            if clipped:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            found[f"{way}, clipped: {clipped}"] = output_of(model)
    for clipped in (False, True):
        fabric.backward(loss_of(fabric, model, 0))
        if clipped:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
        model.zero_grad()
        optimizer.step()
        found[f"all were discarded, clipped: {clipped}"] = output_of(model)
    return found


def not_averaged_and_zeroed(fabric: Any) -> Tensor:
    """A synchronised backward, one without synchronisation, zeroed, and a synchronised one."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    fabric.backward(loss_of(fabric, model, 0))
    with fabric.no_backward_sync(model):
        fabric.backward(loss_of(fabric, model, 1))
    model.zero_grad()
    fabric.backward(loss_of(fabric, model, 2))
    with fabric.no_backward_sync(model):
        fabric.backward(loss_of(fabric, model, 3))
    fabric.backward(loss_of(fabric, model, 4))
    optimizer.step()
    return output_of(model)


def output_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.ones(2, 3)).clone()


def train(fabric: Any, leave_out: Sequence[str]) -> Any:
    return zeroed_in_every_way(fabric, leave_out), not_averaged_and_zeroed(fabric)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        *(
            DeepSpeedStrategy(stage=stage, offload_optimizer=offload)
            for stage in (1, 2, 3)
            for offload in (False, True)
        ),
        DeepSpeedStrategy(stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}),
        FairScaleShardedStrategy(),
        FairScaleFSDPStrategy(),
        FSDPStrategy(),
        FSDPStrategy(auto_wrap_policy={nn.Linear}),
    ],
    ids=repr,
)
def test_gradients_are_zeroed_as_in_plain_pytorch(strategy: Strategy) -> None:
    leave_out = IN_PART if isinstance(strategy, DeepSpeedStrategy) else ()  # there they raise
    found = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2).launch(train, leave_out)
    torch.testing.assert_close(found, train(Plain(), leave_out), rtol=1e-5, atol=1e-5)


def zeroed_before_a_backward_of_torch(fabric: Any) -> Tensor:
    """As above, in every way between forward and backward, where `loss.backward()` is the user's own."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.02))
    for number, zero_grad in enumerate(WAYS.values()):
        loss_of(fabric, model, 2 * number).backward()  # type: ignore[no-untyped-call]
        loss = loss_of(fabric, model, 2 * number + 1)
        zero_grad(model, optimizer)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return output_of(model)


@pytest.mark.slow
def test_fully_shard_zeroes_before_a_backward_of_torch() -> None:
    found = Fabric(accelerator=ACCELERATOR, strategy="fsdp", devices=2).launch(zeroed_before_a_backward_of_torch)
    torch.testing.assert_close(found, zeroed_before_a_backward_of_torch(Plain()), rtol=1e-5, atol=1e-5)


def misused(fabric: Fabric) -> list[str]:
    """What is raised where a gradient in shards is read or replaced, and where some are zeroed."""
    found = []
    net = Net()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    fabric.backward(loss_of(fabric, model, 0))
    assert all(each.grad is not None and each.grad.shape == each.shape for each in model.parameters())
    found.append(words_of(nn.utils.clip_grad_norm_, model.parameters(), 1.0))
    bias = model.second.bias
    bias.grad = torch.zeros_like(bias)
    found.append(words_of(optimizer.step))
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())
    fabric.backward(loss_of(fabric, model, 0))
    model.first.zero_grad()
    found.append(words_of(optimizer.step))
    return found


def words_of(action: Any, *args: Any) -> str:
    try:
        action(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_in_shards_that_is_read_or_replaced_raises_with_what_to_write(stage: int) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=DeepSpeedStrategy(stage=stage), devices=2)
    read, replaced, in_part = fabric.launch(misused)
    assert read.startswith("`aten.")
    assert read.endswith(
        "of a gradient that DeepSpeed keeps, in shards or not averaged yet: `parameter.grad` has no values here. To "
        "clip, or for the norm, call `fabric.clip_gradients(model, optimizer, max_norm=...)`; to read gradients, use "
        "`strategy='ddp'`."
    )
    assert replaced == (
        "Another gradient was assigned to `second.bias.grad`, but DeepSpeed would step with the one that it keeps. "
        "Change the loss instead, or use `strategy='ddp'`. `None` discards the gradient."
    )
    assert in_part == (
        "2 gradients of `Net` were zeroed since the last backward, and others were not: DeepSpeed keeps all "
        "gradients together. Zero all of them, or pass `strategy='ddp'` or 'fsdp'."
    )
