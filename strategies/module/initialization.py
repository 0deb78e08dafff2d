"""Construct a model on its device, in its dtype, and without initialising it twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fabric.strategies.module.deferred_init import leave_empty
from fabric.strategies.precision.forward_precision import default_dtype
from fabric.strategies.precision.precision import Precision


class SkipInitialization(TorchFunctionMode):
    """Within the context, the functions of `torch.nn.init` mark tensors as empty: see `deferred_init.py`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return leave_empty(kwargs["tensor"] if "tensor" in kwargs else args[0])
        return function(*args, **kwargs)


@contextmanager
def new_tensors(device: torch.device, precision: Precision, *, empty: bool = False) -> Iterator[None]:
    """Within the context, tensors are created on `device` with the precision's parameter dtype.

    `empty`: parameters are not initialised, which saves time if weights are loaded next.
    """
    with default_dtype(precision.param_dtype), device, SkipInitialization() if empty else nullcontext():
        yield
