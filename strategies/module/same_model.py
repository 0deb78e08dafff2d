"""Check that all ranks set up the same model.

Strategies match the tensors of ranks by their order. If they differ, as where each rank makes experts of its own, gloo
aborts or waits until its timeout, and tensors of the same shape are mixed silently.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.collectives.call_check import check_call
from fabric.strategies.precision.forward_precision import cast, casts
from fabric.strategies.runtime import Runtime


def refuse_different_models(
    runtime: Runtime, module: nn.Module, moment: str = "setup of", *, recurse: bool = True
) -> None:
    """Raise unless the ranks have parameters and buffers of the same names, shapes and dtypes in the same order.

    `moment`: begins the error. `recurse`: also those of submodules. Dtypes are those after the precision's cast.
    Ranks: all call it. Cost: one all-reduce of two numbers, and some microseconds per tensor; none in a world of one.
    Raises: CollectiveError on every rank, with what each has.
    """
    if runtime.collective.size == 1:
        return
    inner = uncompiled(module)
    lines = [
        *(f"{name}: {_words(runtime, each)}" for name, each in inner.named_parameters(recurse=recurse)),
        *(f"{name}: {_words(runtime, each)}, a buffer" for name, each in inner.named_buffers(recurse=recurse)),
    ]
    call = "\n".join([f"{moment} `{type(inner).__name__}`", *lines])
    check_call(runtime.collective, call, advice=_SAME)


def refuse_partly_on_meta(runtime: Runtime, module: nn.Module) -> None:
    """Raise unless the same tensors are on the meta device on all ranks. Ranks: all call it. Cost: as above.

    Raises: CollectiveError on every rank, with the tensors that each has there.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    call = f"setup of `{type(module).__name__}`, with these tensors on the meta device"
    lines = [name for name, tensor in named if tensor.is_meta]
    check_call(runtime.collective, "\n".join([call, *lines]), advice=_META)


def _words(runtime: Runtime, tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "without a shape"
    dtype = tensor.dtype
    if casts(runtime.precision):
        dtype = cast(runtime.precision, torch.empty(0, dtype=dtype, device="meta")).dtype
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{str(dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}"


_META = (
    "Make the model on the meta device on every rank or on none; a model made on rank 0 alone needs `strategy='fsdp'`."
)
_SAME = (
    "`fabric.setup` needs the same model on every rank, made in the same order (a `set` has another on each rank). "
    "Where each rank has a part of its own, such as experts of other sizes, pass `strategy=ManualStrategy(...)`."
)
