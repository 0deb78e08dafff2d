"""Optimizers are tried on small tensors: whether each element's update depends on that element alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fabric.strategies.gradients.elementwise import is_independent, refuse_dependent


class Rule(Optimizer):
    """Adds `change(parameter, gradient)` to each parameter."""

    def __init__(self, parameters: Iterable[Any], change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.change(parameter, parameter.grad), alpha=-group["lr"])


class Wrapping(Optimizer):
    """Steps another optimizer, whose groups it shares."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, inner.state  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class GlobalNorm(Optimizer):
    """Divides all gradients by their common norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            each.add_(each.grad / norm, alpha=-0.1)


class NeedsClosure(SGD):
    """As sharpness-aware minimisation does."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def elementwise(parameter: Tensor, gradient: Tensor) -> Tensor:
    return gradient.sign() + 0.1 * parameter


def trust_ratio(parameter: Tensor, gradient: Tensor) -> Tensor:
    return gradient * (parameter.norm() / gradient.norm())


def matrices(parameter: Tensor, gradient: Tensor) -> Tensor:
    return torch.linalg.qr(gradient)[0] if gradient.ndim == 2 else gradient


def decays_matrices(parameter: Tensor, gradient: Tensor) -> Tensor:
    return gradient + parameter if gradient.ndim == 2 else gradient


def noisy(parameter: Tensor, gradient: Tensor) -> Tensor:
    return gradient + torch.randn_like(gradient)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]


@pytest.mark.parametrize(
    ("make", "in_slices", "in_parameters"),
    [
        (lambda held: AdamW(held), True, True),
        (lambda held: Rule(held, elementwise), True, True),
        (lambda held: Rule(held, trust_ratio), False, True),
        (lambda held: Rule(held, matrices), False, True),
        (lambda held: Rule(held, decays_matrices), False, True),
        (lambda held: GlobalNorm(held, {}), False, False),
        (lambda held: Wrapping(Rule(held, elementwise)), True, True),
        (lambda held: Rule(held, noisy), None, None),
        (lambda held: NeedsClosure(held), None, None),
    ],
    ids=["torch", "elementwise", "trust ratio", "matrices", "ndim", "all", "wrapping", "noise", "closure"],
)
def test_an_update_from_more_than_its_own_element_is_found(
    make: Callable[[list[nn.Parameter]], Optimizer], in_slices: bool | None, in_parameters: bool | None
) -> None:
    held = parameters()
    optimizer = make(held)
    before = torch.get_rng_state()
    assert is_independent(optimizer, flat=True) is in_slices
    assert is_independent(optimizer, flat=False) is in_parameters
    assert all(torch.equal(each, torch.ones_like(each)) and each.grad is None for each in held)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_is_tried_with_its_scheduler_its_state_and_each_of_its_groups() -> None:
    one, two = parameters()
    optimizer = Rule([one], elementwise)
    LambdaLR(optimizer, lambda step: 0.0)  # a rate of zero hides every difference
    one.grad = torch.ones_like(one)
    optimizer.state[one]["moment"] = torch.ones(3, 2)
    assert is_independent(optimizer, flat=True) is True
    optimizer.add_param_group({"params": [two], "lr": 0.1})
    optimizer.change = trust_ratio
    with pytest.raises(ValueError, match="no `Rule`"):
        refuse_dependent([optimizer], "no `{optimizer}`", flat=True)
    assert torch.equal(optimizer.state[one]["moment"], torch.ones(3, 2))
    assert torch.equal(one, torch.ones(3, 2))
