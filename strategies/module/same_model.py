"""Check that all ranks set up the same model.

Strategies match the tensors of ranks by their order. If they differ, as where each rank makes experts of its own, gloo
aborts or waits until its timeout, and tensors of the same shape are mixed silently.
"""

from __future__ import annotations

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
    _refuse_lazy(inner)

    def words(tensor: Tensor) -> str:
        there = ", on the meta device" if tensor.is_meta and not fills_from_rank_zero else ""
        return _words(tensor) + there

    lines = [
        *(f"{name}: {words(each)}" for name, each in inner.named_parameters(recurse=recurse)),
        *(f"{name}: {words(each)}, a buffer" for name, each in inner.named_buffers(recurse=recurse)),
    ]
    call = "\n".join([f"{moment} `{type(inner).__name__}`", *lines])
    check_call(runtime.collective, call, advice=_SAME)


def _refuse_lazy(module: nn.Module) -> None:
    names = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]
    if names:
        raise ValueError(_LAZY.format(names=name_some(names), model=type(module).__name__, count=len(names)))


def refuse_meta(module: nn.Module) -> None:
    """Raise ValueError if a tensor is on the meta device, for a strategy that fills none."""
    inner = uncompiled(module)
    names = [name for name, tensor in (*inner.named_parameters(), *inner.named_buffers()) if tensor.is_meta]
    if names:
        raise ValueError(_ON_META.format(name=names[0], model=type(inner).__name__, count=len(names)))


def _words(tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    inner = plain_tensors(tensor).values() if is_wrapped(tensor) else ()
    of = f", of {', '.join(str(Spec.of(each)) for each in inner)}" if inner else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}{of}"


_ON_META = (
    "{name!r} of `{model}` is on the meta device, and has no values ({count} tensors are there). Make the model "
    "without `torch.device('meta')`, or within `fabric.init_module(empty_init=True)` and load its weights after "
    "`setup`; `strategy='fsdp'` takes models on the meta device, and initialises them in shards."
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
