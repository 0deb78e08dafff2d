"""A precision as what happens around forward: inputs cast for a `-true` precision, autocast for a `-mixed` one.

Under a `-true` precision a tensor that forward makes has its dtype too, as in a model of that dtype in plain PyTorch
under `torch.set_default_dtype`; in backward as well, since activation checkpointing runs forward again there. Complex
numbers stay complex. Outputs stay what forward made them. Loss functions called outside forward use
`Fabric.autocast()`.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.nest import map_only_tensors
from fabric.strategies.precision.precision import Precision


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which operations choose their dtype; no context for a precision that is not mixed."""
    if not precision.is_mixed:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.compute_dtype)


def casts(precision: Precision) -> bool:
    """Whether the precision changes the dtype of modules and inputs. `32-true` leaves both as the user made them."""
    return not precision.is_mixed and precision.param_dtype != torch.float32


def cast_module(precision: Precision, module: nn.Module) -> None:
    """Give floating-point parameters and buffers the precision's dtype, in place; complex ones its complex dtype."""
    if not casts(precision):
        return
    if any(tensor.is_complex() for tensors in (module.parameters(), module.buffers()) for tensor in tensors):
        # `module.to(dtype)` would drop imaginary parts.
        module._apply(lambda tensor: cast(precision, tensor))  # type: ignore[no-untyped-call]
    else:
        module.to(precision.param_dtype)


def cast_inputs(precision: Precision, inputs: Any) -> Any:
    """Floating-point and complex tensors of a nest in the precision's dtypes; everything else as it is.

    A container in which nothing is cast is given back itself.
    """

    return map_only_tensors(partial(cast, precision), inputs, keep=True)


def cast(precision: Precision, tensor: Tensor) -> Tensor:
    """The tensor in the precision's dtype of its kind; integers and booleans as they are."""
    if tensor.is_floating_point():
        return tensor.to(precision.param_dtype)
    return tensor.to(complex_dtype(precision)) if tensor.is_complex() else tensor


def complex_dtype(precision: Precision) -> torch.dtype:
    """The dtype of complex numbers: complex128 for float64, else complex64.

    Half precision keeps them in complex64: torch (2.13) has no products of complex32 on the CPU, and no complex
    numbers of two bfloat16 at all.
    """
    return torch.complex128 if precision.param_dtype == torch.float64 else torch.complex64


@final
class DefaultDtype:
    """Within it, new floating-point tensors have one dtype. It is entered again from within, and from any thread.

    torch's default is one for the whole process, and so is this object: see `_default_dtype`. So whoever enters first
    sets it, and whoever leaves last restores it; another thread that makes a tensor meanwhile, without saying its
    dtype, gets this one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._before = dtype
        self._num_within = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(self._dtype)
            self._num_within += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within == 0:
                torch.set_default_dtype(self._before)


def dtype_of_new_tensors(precision: Precision) -> AbstractContextManager[None]:
    """The context for forward and backward; no context for a precision that leaves modules as the user made them."""
    return _default_dtype(precision.param_dtype) if casts(precision) else nullcontext()


@cache
def _default_dtype(dtype: torch.dtype) -> DefaultDtype:
    """The one of the process: ranks may be threads of it, and two of them would restore each other's default."""
    return DefaultDtype(dtype)
