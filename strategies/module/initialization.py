"""Making a model where and as it will be used: on its device, in its dtype, and without filling it twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fabric.strategies.module.deferred_init import leave_empty
from fabric.strategies.precision.precision import Precision


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it, new floating-point tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class SkipInitialization(TorchFunctionMode):
    """Within it, the functions of `torch.nn.init` mark tensors as empty and draw no number: see `deferred_init.py`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return leave_empty(kwargs["tensor"] if "tensor" in kwargs else args[0])
        return function(*args, **kwargs)


@contextmanager
def new_tensors(device: torch.device, precision: Precision, *, empty: bool = False) -> Iterator[None]:
    """Within it, tensors are made on `device` with the precision's parameter dtype.

    `empty`: parameters are not initialised. For weights that are about to be loaded: filling them first costs time
    and, on large models, random numbers nobody will see.
    """
    with default_dtype(precision.param_dtype), device, SkipInitialization() if empty else nullcontext():
        yield
