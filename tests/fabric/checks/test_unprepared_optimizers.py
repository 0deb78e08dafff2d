"""Optimizers that were not set up: said where only their steps are not counted, and raised where they train wrongly."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD, Optimizer

from fabric import Fabric


class Sharpness(Optimizer):
    """As SAM does, it steps by an optimizer that it makes over its own groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def train(fabric: Fabric) -> list[list[str]]:
    """What is said of an optimizer that was not set up, and of one within another that was."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fabric").addHandler(handler)
    alone, within = nn.Linear(2, 1), nn.Linear(2, 1)
    model = fabric.setup(alone)
    optimizers = [SGD(model.parameters(), lr=0.1), fabric.setup(within, Sharpness(within.parameters()))[1]]
    found = []
    for net, optimizer in zip((model, within), optimizers, strict=True):
        heard.clear()
        for _ in range(5):
            fabric.backward(net(torch.randn(4, 2)).square().mean(), model=net)
            optimizer.step()
            optimizer.zero_grad()
        found.append([each for each in heard if "not set up" in each])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_optimizer_of_a_prepared_model_that_was_not_set_up_is_said_once_unless_another_one_steps_by_it(
    strategy: str,
) -> None:
    said, within = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy).launch(train)
    assert len(said) == 1
    assert "`SGD.step()` of an optimizer of `" in said[0]
    assert "`fabric.num_steps` does not count its steps" in said[0]
    assert within == []


def test_an_optimizer_that_was_not_set_up_would_step_with_scaled_gradients_and_raises() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision="16-mixed") as fabric:
        model = fabric.setup(nn.Linear(2, 1))
        optimizer = SGD(model.parameters(), lr=0.1)
        fabric.backward(model(torch.ones(1, 2)).sum() * 1e-3)
        with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` of an optimizer of `Linear` .* multiplies the loss"):
            optimizer.step()
        fabric.setup_optimizers(optimizer)
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(1, 2)).sum() * 1e-3)
        optimizer.step()
        assert fabric.num_steps == 1
