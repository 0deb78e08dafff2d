"""`pytest --optimizers foreach --optimizers fused`: each test that steps optimizers runs with each, if it names none.

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
"""By which ranks are told, at each step; empty where a test of such a run takes torch's default."""

STEPPING = (
    "tests/conformance/test_strategies.py::test_numbers",
    "tests/harness/test_worlds.py",
    "tests/strategies/ddp/",
    "tests/strategies/fairscale/",
    "tests/strategies/fsdp/",
    "tests/strategies/gradients/",
    "tests/strategies/manual/",
    "tests/strategies/model_parallel/",
    "tests/strategies/module/",
    "tests/strategies/optimizers/",
    "tests/strategies/precision/",
    "tests/strategies/sharding/",
)
"""Tests that step optimizers: files and folders."""
NOT_STEPPING = (
    # Sparse gradients, and optimizers of one rank each: they name their kernels, or have none.
    "tests/strategies/gradients/test_sparse.py",
    "tests/strategies/optimizers/test_owners.py",
    # Stages and shares of a sequence: parameters are whole or DTensors as elsewhere.
    "tests/strategies/model_parallel/pipeline/",
    "tests/strategies/model_parallel/test_context_parallel.py",
    # Forwards, refusals and programs.
    *(
        f"tests/strategies/module/test_{name}.py"
        for name in ("activation_checkpointing", "compile", "forward", "memory_formats", "output_tensors", "reentrant")
    ),
    "tests/strategies/module/test_wrap_policy.py",
    "tests/strategies/precision/test_output_dtype.py",
    "tests/strategies/sharding/test_execution_order.py",
    "tests/strategies/sharding/test_resharded_roots.py",
)
"""Of these, tests of which other kernels change nothing."""


def steps_optimizers(nodeid: str) -> bool:
    """Whether a test runs with each of the chosen kernels."""
    return nodeid.startswith(STEPPING) and not nodeid.startswith(NOT_STEPPING)


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
