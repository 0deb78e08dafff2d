"""The effect of a precision on forward: inputs are cast for a `-true` precision, autocast is on for a `-mixed` one.

Under a `-true` precision tensors created in forward have its dtype too, as in plain PyTorch under
`torch.set_default_dtype`; also in backward, where activation checkpointing runs forward again. Complex numbers stay
complex. Outputs are not cast. Loss functions called outside forward use `Fabric.autocast()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.precision.precision import Precision
from fabric.strategies.tensors.nests import map_only_tensors


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast context of a mixed precision; for others a null context."""
    if not precision.is_mixed:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.compute_dtype)


def casts(precision: Precision) -> bool:
    """Whether the precision changes the dtype of modules and inputs. `32-true` changes neither."""
    return not precision.is_mixed and precision.param_dtype != torch.float32


def cast_module(precision: Precision, module: nn.Module) -> None:
    """Cast floating-point parameters and buffers to the precision's dtype, in place; complex ones to its complex
    dtype."""
    if casts(precision):  # `module.to(dtype)` would drop imaginary parts
        module._apply(partial(cast, precision))  # type: ignore[no-untyped-call]


def cast_inputs(precision: Precision, inputs: Any) -> Any:
    """Cast floating-point and complex tensors in nested containers to the precision's dtypes; all else is kept.

    A container in which nothing is cast is returned itself.
    """
    return map_only_tensors(partial(cast, precision), inputs, keep=True)


def cast(precision: Precision, tensor: Tensor) -> Tensor:
    """Cast the tensor to the precision's dtype for its kind; integers and booleans are kept."""
    if tensor.is_floating_point():
        return tensor.to(precision.param_dtype)
    return tensor.to(complex_dtype(precision)) if tensor.is_complex() else tensor


def complex_dtype(precision: Precision) -> torch.dtype:
    """The dtype of complex numbers: complex128 for float64, else complex64.

    Half precision keeps complex64: torch (2.13) has no products of complex32 on the CPU, and no complex bfloat16.
    """
    return torch.complex128 if precision.param_dtype == torch.float64 else torch.complex64


@final
class DefaultDtype:
    """Context: new floating-point tensors have one dtype. Reentrant.

    torch's default dtype is global to the process: threads that enter share the dtypes to be restored.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._before.pop())


def dtype_of_new_tensors(precision: Precision) -> AbstractContextManager[None]:
    """The context for forward and backward; a null context for a precision that does not cast modules."""
    return default_dtype(precision.param_dtype) if casts(precision) else nullcontext()


@cache
def default_dtype(dtype: torch.dtype) -> DefaultDtype:
    """The context for this dtype, one instance in the process: ranks may be threads, and two instances would restore
    each other's default."""
    return DefaultDtype(dtype)
