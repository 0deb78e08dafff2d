"""Optimizers whose `step` calls that of their base class, which torch wraps too: hooks are called once a step."""

from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Optimizer

from fabric import Fabric
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.dtensor import whole

NUM_STEPS = 3


class DerivedSGD(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class DerivedAdafactor(Adafactor):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


DERIVED = {"SGD": (DerivedSGD, SGD), "Adafactor": (DerivedAdafactor, Adafactor)}


def make(name: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    derived, base = DERIVED[name]
    base([nn.Parameter(torch.ones(2, 2))], lr=0.1)  # from now on torch wraps its step
    model = nn.Linear(4, 4, bias=False)
    optimizer = derived(model.parameters(), lr=0.1)
    if name == "SGD":
        optimizer.updates_each = "element"  # type: ignore[attr-defined]
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, backward: Any, scale: float = 1.0) -> Tensor:
    for step in range(NUM_STEPS):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        device = next(model.parameters()).device
        backward((model(inputs.to(device)).float().square() * (scale if step == 1 else 1.0)).mean())
        optimizer.step()
        optimizer.zero_grad()
    return whole(next(model.parameters())).detach().cpu()


def run(fabric: Fabric, name: str) -> tuple[int, Tensor]:
    model, optimizer = fabric.setup(*make(name))
    weights = train(model, optimizer, fabric.backward)
    state: Any = fabric.state_dict(model)
    return fabric.num_steps, state["weight"] if state else weights


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("ddp", "SGD"), ("fsdp", "SGD"), ("fsdp", "Adafactor"), ("ddp_sharded", "SGD"), ("ddp_fully_sharded", "SGD")],
)
def test_a_step_is_counted_compared_and_taken_once(strategy: str, name: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, sanitize="always")
    found = fabric.launch(run, name)
    assert found is not None
    num_steps, weights = found
    assert num_steps == NUM_STEPS
    torch.testing.assert_close(weights, train(*make(name), Tensor.backward))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_step_whose_gradients_are_not_finite_is_skipped_once(precision: str) -> None:
    """Of three steps the second overflows: the guard or the loss scaler skips it."""
    fabric = Fabric(accelerator=ACCELERATOR, devices=1, precision=precision)
    if precision == "32-true":
        fabric.guard_gradients("skip")
    model, optimizer = fabric.setup(*make("SGD"))
    before = fabric.num_steps
    train(model, optimizer, fabric.backward, scale=float("inf"))
    assert (before, fabric.num_steps) == (0, NUM_STEPS - 1)
    fabric.close()


def test_hooks_are_called_in_the_outer_step_also_after_one_that_raised() -> None:
    calls: list[str] = []
    parameter = nn.Parameter(torch.ones(2))
    SGD([parameter], lr=0.1)
    optimizer = DerivedSGD([parameter], lr=0.1)

    def before(*_: Any) -> None:
        calls.append("before")

    def fail() -> float:
        raise ValueError("in the closure")

    remove = hook_steps(optimizer, before, lambda *_: calls.append("after"))
    with pytest.raises(ValueError, match="in the closure"):
        optimizer.step(fail)
    optimizer.step()
    assert calls == ["before", "before", "after"]
    remove()
    optimizer.step()
    assert len(calls) == 3
