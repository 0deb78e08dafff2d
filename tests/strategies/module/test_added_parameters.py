"""Layers added or unfrozen, and parameter groups added, after `setup` under DeepSpeed and FairScale: each trains as in
plain PyTorch, or raises with what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fabric import Fabric
from fabric.strategies.deepspeed.strategy import DeepSpeedStrategy
from fabric.strategies.fairscale.fsdp import FairScaleFSDPStrategy
from fabric.strategies.fairscale.sharded_ddp import FairScaleShardedStrategy
from fabric.strategies.strategy import Strategy

ZERO = [
    *(DeepSpeedStrategy(stage=stage) for stage in (1, 2, 3)),
    *(DeepSpeedStrategy(stage=stage, offload_optimizer=True) for stage in (2, 3)),
]
FAIRSCALE = [FairScaleShardedStrategy(), FairScaleFSDPStrategy()]


class Plain:
    """The words of a fabric, in one process of plain PyTorch."""

    def setup(self, *objects: Any) -> Any:
        return objects

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))


def one_step(fabric: Any, model: nn.Module, optimizer: Optimizer) -> Tensor:
    loss = (model(torch.ones(2, 3)) - 3).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def words_of(action: Any, *args: Any) -> str:
    try:
        action(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def come_late(fabric: Fabric, stage: int) -> list[str]:
    """What is raised for a layer that is unfrozen, for one that is added, and for parameter groups."""
    found = []
    unfrozen = layers()
    model, optimizer = fabric.setup(unfrozen, SGD(unfrozen.parameters(), lr=0.1))
    one_step(fabric, model, optimizer)
    model[2].requires_grad_(True)
    found.append(words_of(one_step, fabric, model, optimizer))
    model[2].requires_grad_(False)
    model.append(nn.Linear(1, 1))
    found.append(words_of(one_step, fabric, model, optimizer))
    model[4].requires_grad_(False)
    if stage == 3:  # where DeepSpeed looks for shards of all there is
        found.append(words_of(one_step, fabric, model, optimizer))
        assert found[-1] == found[-2] == words_of(one_step, fabric, model, optimizer)
        del model[4], found[-1]
    one_step(fabric, model, optimizer)  # not to be trained, it may be there
    optimizer.add_param_group({"params": list(nn.Linear(1, 1).parameters()), "lr": 0.1})
    found.append(words_of(one_step, fabric, model, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ZERO, ids=repr)
def test_parameters_added_after_setup_raise_under_deepspeed_by_name(strategy: DeepSpeedStrategy) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2)
    unfrozen, added, group = fabric.launch(come_late, strategy.stage)
    what_to_write = "or set up the model again in a new `Fabric`, or pass `strategy='ddp'`."
    assert unfrozen == (
        "2 parameters of `Sequential` ('2.weight', '2.bias') were added or unfrozen after `fabric.setup`. DeepSpeed "
        "trains the shards that it made then, so these would not be trained. Before `fabric.setup`, add all layers, "
        f"and call `requires_grad_()` on all parameters that are ever trained; {what_to_write}"
    )
    assert added.startswith("2 parameters of `Sequential` ('4.weight', '4.bias') were added or unfrozen after")
    assert group == (
        "A parameter group was added to `SGD` after `fabric.setup`: DeepSpeed steps the shards that it made then, so "
        f"this group would not be trained. Add it before `fabric.setup`, with `lr=0` until it is to be trained; "
        f"{what_to_write}"
    )


def freeze_for_a_while(fabric: Any) -> list[Tensor]:
    """As a critic is, while its generator is trained: frozen between steps."""
    net = layers()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.5))
    losses = []
    for _ in range(3):
        trained = [each for each in model.parameters() if each.requires_grad]
        losses.append(one_step(fabric, model, optimizer))
        for each in trained:
            each.requires_grad_(False)
        with torch.no_grad():
            model(torch.ones(1, 3))
        model(torch.ones(1, 3, requires_grad=True)).sum().detach()
        for each in trained:
            each.requires_grad_(True)
        model[1] = nn.ReLU()  # without parameters
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*ZERO[1:3], *FAIRSCALE], ids=repr)
def test_what_is_frozen_for_a_while_and_layers_without_parameters_train_as_in_plain_pytorch(strategy: Strategy) -> None:
    found = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2).launch(freeze_for_a_while)
    torch.testing.assert_close(found, freeze_for_a_while(Plain()))


def unfreeze(fabric: Any) -> list[Tensor]:
    """A frozen layer is unfrozen once, and is in the optimizer from the start."""
    net = layers()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.5))
    losses = [one_step(fabric, model, optimizer)]
    model[2].requires_grad_(True)
    return losses + [one_step(fabric, model, optimizer) for _ in range(3)]


def unfreeze_and_add(fabric: Fabric) -> tuple[list[Tensor], str]:
    losses = unfreeze(fabric)
    net = layers()
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    model.append(nn.Linear(1, 1))
    return losses, words_of(one_step, fabric, model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", FAIRSCALE, ids=repr)
def test_fairscale_trains_what_was_unfrozen_and_raises_for_what_was_added(strategy: Strategy) -> None:
    losses, words = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2).launch(unfreeze_and_add)
    torch.testing.assert_close(losses, unfreeze(Plain()))
    assert words == (
        "2 parameters of `Sequential` ('4.weight', '4.bias') were added or unfrozen after `fabric.setup`. FairScale "
        "has assigned the former parameters to ranks, and these would differ between ranks. Add layers before "
        "`fabric.setup`, or pass `strategy='ddp'`."
    )
