"""Construct a model on its device, in its dtype, and without initialising it twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from fabric.strategies.module.init_calls import NotedCalls
from fabric.strategies.precision.forward_precision import default_dtype
from fabric.strategies.precision.precision import Precision


@contextmanager
def new_tensors(device: torch.device, precision: Precision, *, empty: bool = False) -> Iterator[None]:
    """Within the context, tensors are created on `device` with the precision's parameter dtype.

    `empty`: parameters are not initialised, which saves time if weights are loaded next: see `deferred_init.py`.
    """
    with default_dtype(precision.param_dtype), device, NotedCalls(skip=True) if empty else nullcontext():
        yield
