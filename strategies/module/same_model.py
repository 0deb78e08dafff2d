"""Check that all ranks set up the same model.

Strategies match the tensors of ranks by their order. If they differ, as where each rank makes experts of its own, gloo
aborts or waits until its timeout, and tensors of the same shape are mixed silently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.collectives.call_check import check_call
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.packing import Spec
from fabric.strategies.tensors.parameters import name_some
from fabric.strategies.tensors.wrapped import is_wrapped, plain_tensors


def refuse_different_models(
    runtime: Runtime,
    module: nn.Module,
    moment: str = "setup of",
    *,
    recurse: bool = True,
    fills_from_rank_zero: bool = False,
) -> None:
    """Raise unless the ranks have parameters and buffers of the same names, shapes and dtypes in the same order, and
    the same ones on the meta device (unless `fills_from_rank_zero`).

    `moment`: begins the error. `recurse`: also those of submodules.
    Ranks: all call it. Cost: one all-reduce of two numbers, and some microseconds per tensor; none in a world of one.
    Raises: CollectiveError on every rank, with what each has. ValueError: a tensor of a lazy module has no shape yet.
    """
    if runtime.collective.size == 1:
        return
    inner = uncompiled(module)
    _refuse(inner, (is_lazy, _LAZY), (lambda tensor: tensor.is_nested, _NESTED), (_is_expanded, _EXPANDED))

    def words(tensor: Tensor) -> str:
        there = ", on the meta device" if tensor.is_meta and not fills_from_rank_zero else ""
        return _words(tensor) + there

    lines = [
        *(f"{name}: {words(each)}" for name, each in inner.named_parameters(recurse=recurse)),
        *(f"{name}: {words(each)}, a buffer" for name, each in inner.named_buffers(recurse=recurse)),
    ]
    call = "\n".join([f"{moment} `{type(inner).__name__}`", *lines])
    check_call(runtime.collective, call, advice=_SAME)


def _refuse(module: nn.Module, *refused: tuple[Callable[[Tensor], bool], str]) -> None:
    """Raise ValueError if a tensor fulfils one of the predicates, with the sentence of that predicate."""
    named = [*module.named_parameters(), *module.named_buffers()]
    for is_refused, sentence in refused:
        names = [name for name, tensor in named if is_refused(tensor)]
        if names:
            raise ValueError(sentence.format(names=name_some(names), model=type(module).__name__, count=len(names)))


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or hasattr(tensor, "ds_shape"):  # in shards, before `setup`
        return False
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in dims)


def refuse_meta(module: nn.Module) -> None:
    """Raise ValueError if a tensor is on the meta device, for a strategy that fills none."""
    _refuse(uncompiled(module), (lambda tensor: tensor.is_meta, _ON_META))


def _words(tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    inner = plain_tensors(tensor).values() if is_wrapped(tensor) else ()
    of = f", of {', '.join(str(Spec.of(each)) for each in inner)}" if inner else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}{of}"


_ON_META = (
    "{count} tensors of `{model}` ({names}) are on the meta device, and have no values. Make the model without "
    "`torch.device('meta')`, or within `fabric.init_module(empty_init=True)` and load its weights after `setup`; "
    "`strategy='fsdp'` takes models on the meta device, and initialises them in shards."
)
_SAME = (
    "`fabric.setup` needs the same model on every rank, made in the same order (a `set` has another on each rank), and "
    "on the meta device on every rank or on none (`strategy='fsdp'` takes one that is made on rank 0 alone). Where "
    "each rank has a part of its own, such as experts of other sizes, pass `strategy=ManualStrategy(...)`."
)
_LAZY = (
    "{count} tensors of `{model}` ({names}) have no shape yet: they are of lazy modules, such as `nn.LazyLinear`, "
    "which make them in the first forward. Run one before `fabric.setup`, on all ranks: `model(torch.zeros(1, 8))`."
)
_NESTED = (
    "{count} tensors of `{model}` ({names}) are nested tensors, which ranks cannot send to one another. Keep what they "
    "are made of as parameters and buffers: `nested.values()` and `nested.offsets()`."
)
_EXPANDED = (
    "{count} tensors of `{model}` ({names}) have several elements in one memory location, as `tensor.expand(...)` "
    "makes them, and ranks write each element. Write `tensor.expand(...).clone()`."
)
