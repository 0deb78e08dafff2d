"""`pytest --optimizers foreach`, or `fused`: optimizers step with these kernels where a test names none.

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
"""By which the fork server of ranks is told."""


def use_chosen() -> None:
    """Use those of the environment from now on in this process, and in its forks."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "foreach":
        found = optimizer._get_foreach_kernels_supported_devices
        optimizer._get_foreach_kernels_supported_devices = lambda: ["cpu", *found()]  # where torch decides the default
    elif chosen == "fused":
        for module, name in ((adagrad, "adagrad"), (adam, "adam"), (sgd, "sgd")):  # AdamW's is Adam's
            setattr(module, name, _fused(getattr(module, name)))


def _fused(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def fused(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        is_left = kwargs.get("foreach") is None and kwargs.get("fused") is None and not kwargs.get("differentiable")
        can = all(map(torch.is_floating_point, params)) and not kwargs.get("has_sparse_grad")
        if step.__name__ == "sgd":  # torch 2.13's has no rule for DTensors, and none for momenta that some lack
            can &= all(type(each) is torch.nn.Parameter for each in params)
            can &= len({momentum is None for momentum in args[1]}) == 1
        step(params, *args, **{**kwargs, "fused": True} if is_left and can else kwargs)

    return fused
