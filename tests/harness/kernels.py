"""`pytest --optimizers foreach --optimizers fused`: each test runs with each, where it names no kernels itself.

On accelerators foreach is torch's default, and fused is what users write. On the CPU torch's default is a loop over the
parameters, whose operators count versions, and dispatch, in another way.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import adagrad, adam, optimizer, sgd

CHOICES = ("foreach", "fused")
VARIABLE = "TESTS_OPTIMIZERS"
"""By which ranks are told, at each step."""


def use_chosen() -> None:
    """Use those that the environment names at a step, in this process and in its forks; torch's where it names none."""
    if VARIABLE in os.environ:
        found = optimizer._get_foreach_kernels_supported_devices  # where torch decides the default
        optimizer._get_foreach_kernels_supported_devices = lambda: ["cpu"] * _is_chosen("foreach") + found()
        for module, name in ((adagrad, "adagrad"), (adam, "adam"), (sgd, "sgd")):  # AdamW's is Adam's
            setattr(module, name, _fused(getattr(module, name)))


def _is_chosen(kind: str) -> bool:
    return os.environ.get(VARIABLE) == kind


def _fused(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def fused(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        is_left = kwargs.get("foreach") is None and kwargs.get("fused") is None and not kwargs.get("differentiable")
        is_left &= _is_chosen("fused")
        can = all(map(torch.is_floating_point, params)) and not kwargs.get("has_sparse_grad")
        if step.__name__ == "sgd":  # torch 2.13's has no rule for DTensors, and none for momenta that some lack
            can &= all(type(each) is torch.nn.Parameter for each in params)
            can &= len({momentum is None for momentum in args[1]}) == 1
        step(params, *args, **{**kwargs, "fused": True} if is_left and can else kwargs)

    return fused
