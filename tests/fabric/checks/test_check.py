"""`Check`: a role with moments, of which a check overrides those that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fabric import Check, Fabric
from fabric.checks.check import MOMENTS, Moments
from fabric.strategies.checkpoint.state import StateAccess
from fabric.strategies.data.loop_progress import LoopProgress
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime


class Recorded(Check):
    """Notes the moments at which it is called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def connected(self, runtime: Runtime) -> None:
        self.seen.append("connected")

    def before_setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.seen.append(f"before_setup of {type(module).__name__} and {len(optimizers)}")

    def model_set_up(self, model: Prepared) -> None:
        self.seen.append(f"model_set_up of {type(model.module).__name__}")

    def optimizers_set_up(self, optimizers: Mapping[Optimizer, StateAccess]) -> None:
        self.seen.append(f"optimizers_set_up of {len(optimizers)}")

    def loader_set_up(self, loader: Iterable[Any], is_split: bool) -> None:
        self.seen.append(f"loader_set_up, split: {is_split}")

    def batch_received(self, batch: Any, source: object) -> None:
        self.seen.append(f"batch_received of {len(batch)}")

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self.seen.append(f"before_backward, synchronised: {is_synchronised}")

    def after_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self.seen.append(f"after_backward, synchronised: {is_synchronised}")

    def gradients_averaged(self, parameters: Iterable[Tensor]) -> None:
        self.seen.append(f"gradients_averaged of {len(list(parameters))}")

    def before_step(self, optimizer: Optimizer) -> None:
        self.seen.append("before_step")

    def after_step(self, optimizer: Optimizer) -> None:
        self.seen.append("after_step")

    def saving(self) -> None:
        self.seen.append("saving")

    def saved(self, path: str, is_blocking: bool) -> None:
        self.seen.append(f"saved, complete: {is_blocking}")

    def loaded(self) -> None:
        self.seen.append("loaded")

    def closing(self) -> None:
        self.seen.append("closing")


def test_a_check_is_called_at_each_of_its_moments_in_their_order(tmp_path: Any) -> None:
    check = Recorded()
    with Fabric(accelerator=ACCELERATOR, devices=1, plugins=[check]) as fabric:
        model = nn.Linear(4, 1)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
        (batch,) = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.ones(2, 4), batch_size=2))
        with fabric.no_backward_sync(model):
            fabric.backward(model(batch).sum())
        fabric.backward(model(batch).sum())
        fabric.average_gradients([nn.Parameter(torch.ones(1))])
        optimizer.step()
        fabric.save(tmp_path / "saved", {"model": model})
        fabric.load(tmp_path / "saved", {"model": model})
    assert check.seen == [
        "connected",
        "before_setup of Linear and 1",
        "model_set_up of Linear",
        "optimizers_set_up of 1",
        "loader_set_up, split: True",
        "batch_received of 2",
        "before_backward, synchronised: False",
        "after_backward, synchronised: False",
        "before_backward, synchronised: True",
        "after_backward, synchronised: True",
        "gradients_averaged of 1",
        "before_step",
        "after_step",
        "saving",
        "saved, complete: True",
        "loaded",
        "closing",
    ]
    assert {word.split(",")[0].split(" ")[0] for word in check.seen} == set(MOMENTS) - {"compared"}  # needs ranks


class Stops(Check):
    def before_step(self, optimizer: Optimizer) -> None:
        raise ArithmeticError("the gradients are odd")


def test_what_a_check_raises_the_program_gets_and_nothing_is_left_on_its_objects() -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Fabric(accelerator=ACCELERATOR, devices=1, plugins=[Stops()]) as fabric:
        model, optimizer = fabric.setup(model, optimizer)
        fabric.backward(model(torch.ones(2, 4).to(fabric.device)).sum())
        with pytest.raises(ArithmeticError, match="the gradients are odd"):
            optimizer.step()
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_moment_that_no_check_overrides_costs_no_call() -> None:
    moments = Moments(LoopProgress())
    moments.add(Check(), stops := Stops())
    assert [name for name in MOMENTS if getattr(moments, name)] == ["before_step"]
    moments.remove(stops)
    assert not any(getattr(moments, name) for name in MOMENTS)


def test_an_object_that_is_no_plugin_is_refused() -> None:
    with pytest.raises(TypeError, match="Pass a `Precision`, an `Environment` or a `Check`; accelerators"):
        Fabric(accelerator="cpu", devices=1, plugins=[object()])
