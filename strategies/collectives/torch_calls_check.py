"""Compares every collective of torch.distributed over the ranks before it runs, in steps that the sanitizer watches.

All calls on process groups go through torch's dispatcher, also those that DDP's reducer makes in C++. So one kernel for
each operator of `c10d` sees them all, on every group and in every thread, and while none is registered they cost
nothing. The ranks of the group compare what they are about to call as `fabric_calls_check.py` does: one all-reduce of a
number; the calls themselves are sent only for the error. So each call waits until all ranks of its group make it, also
one that was started with `async_op=True`.

Unlike `TORCH_DISTRIBUTED_DEBUG=DETAIL`, it needs no second process group, and works for groups that exist already. The
line of the program is shown, and not compared: ranks may make one call on different lines.
"""

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fabric.launchers.watch.table import CALLS, GRADIENTS
from fabric.strategies.collectives.fabric_calls_check import difference, hash_of, is_comparing, is_in_a_started_thread
from fabric.strategies.collectives.process_group import TorchCollective, sum_message


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """How an operator of `c10d` is shown, and what must be equal on all ranks."""

    words: str
    arguments: tuple[str, ...]
    """Tensors whose shapes and dtypes must be equal, by their names in the schema; options whose values must be."""
    only_dtypes: bool = False
    """Whether shapes may differ."""


OPERATORS: Mapping[str, _Operator] = {
    "allreduce_": _Operator(words="all_reduce", arguments=("tensors",)),
    "allreduce_coalesced_": _Operator(words="all_reduce_coalesced", arguments=("tensors",)),
    "allgather_": _Operator(words="all_gather", arguments=("output_tensors",)),
    "_allgather_base_": _Operator(words="all_gather_into_tensor", arguments=("input_tensor",)),
    "allgather_coalesced_": _Operator(words="all_gather_coalesced", arguments=("output_lists",)),
    "allgather_into_tensor_coalesced_": _Operator(words="all_gather_into_tensor_coalesced", arguments=("inputs",)),
    "reduce_scatter_": _Operator(words="reduce_scatter", arguments=("input_tensors",)),
    "_reduce_scatter_base_": _Operator(words="reduce_scatter_tensor", arguments=("input_tensor",)),
    "reduce_scatter_tensor_coalesced_": _Operator(words="reduce_scatter_tensor_coalesced", arguments=("inputs",)),
    "broadcast_": _Operator(words="broadcast", arguments=("tensors", "root_rank")),
    "reduce_": _Operator(words="reduce", arguments=("tensors", "root_rank")),
    "gather_": _Operator(words="gather", arguments=("input_tensors", "root_rank")),
    "gather_into_tensor_": _Operator(words="gather_into_tensor", arguments=("input_tensor", "root_rank")),
    "scatter_": _Operator(words="scatter", arguments=("output_tensors", "root_rank")),
    "alltoall_base_": _Operator(words="all_to_all_single", arguments=("input",), only_dtypes=True),
    "alltoall_": _Operator(words="all_to_all", arguments=("input_tensors",), only_dtypes=True),
    "barrier": _Operator(words="barrier", arguments=()),
}
"""The collectives of torch 2.9 to 2.14, which has `gather_into_tensor_` first."""
NOT_COMPARED = ("send", "recv_", "recv_any_source_", "monitored_barrier_", "check_for_nan")
"""Operators of `c10d` that not all ranks of a group call, or that do not communicate."""


@contextmanager
def compare_collectives(progress: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Context in which all collectives of this process are compared. Ranks: all; process groups may exist already.

    A collective that differs from the other ranks' in operation, shapes, dtypes or source raises CollectiveError on all
    ranks of its group, before it runs. Not compared: the operator of a reduction, calls of threads that the program
    starts, and those on groups without a backend for the CPU, which fabric does not create.
    """
    entry = progress, _comparing[0][1] if _comparing else _register_kernels()
    _comparing.append(entry)
    try:
        yield
    finally:
        _comparing.remove(entry)
        del entry


# Note [One kernel for each operator]
# A process has one kernel for each operator, and may have several fabrics that compare: the first registers the
# kernels, and the last frees the library, which removes them. An error reports the progress of the last.
_comparing: list[tuple[Callable[[], str], Any]] = []


def _register_kernels() -> Any:
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, operator in _operators():
        library.impl(name, _kernel(operator, OPERATORS.get(name)), "BackendSelect", with_keyset=True)
    return library


def _operators() -> Iterator[tuple[str, Any]]:
    """The operators of `c10d` in this torch that all ranks of a group call, also those that `OPERATORS` lacks."""
    of_torch: list[str] = getattr(torch._C, "_dispatch_get_all_op_names", list)()
    for name in {*OPERATORS, *(name[6:] for name in of_torch if name.startswith("c10d::"))}.difference(NOT_COMPARED):
        if overloads := getattr(torch.ops.c10d, name, None):
            yield name, overloads.default


@cache
def _say_uncompared(name: str) -> None:
    warnings.warn(
        f"`{name}` is not compared over the ranks: the sanitizer does not know this operator of torch "
        f"{torch.__version__}, and compares the other collectives. A newer torchfabric may know it.",
        stacklevel=5,
    )


def _kernel(operator: Any, shown: _Operator | None) -> Callable[..., Any]:
    names, thread = [argument.name for argument in operator._schema.arguments], threading.get_ident()

    def compare(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        is_elsewhere = threading.get_ident() != thread and is_in_a_started_thread()
        if shown is None:
            _say_uncompared(operator.name())
        elif not (is_elsewhere or _is_message(inspect.currentframe())):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            _compare(ProcessGroup.unbox(given["process_group"]), shown, given)
        return operator.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *args, **kwargs)

    return compare


def _is_message(kernel: FrameType | None) -> bool:
    """Whether this is the message of a comparison. The kernel keeps no frame of its own, which would keep its tensors
    in a cycle. None above it: C++ calls in a thread of its own."""
    caller = None if kernel is None else kernel.f_back
    return caller is not None and caller.f_code is _MESSAGE


_MESSAGE = sum_message.__code__
"""Sends the message of a comparison, which is a collective, too."""


def _compare(group: ProcessGroup, shown: _Operator, given: Mapping[str, Any]) -> None:
    if group.size() == 1 or is_comparing() or "cpu:" not in dist.get_backend_config(group):
        return
    operands = [words for name in shown.arguments for words in _operands(name, given[name], shown)]
    call = "\n".join([shown.words, *operands])
    # Gradients are compared with the program's own calls, so that both raise where one meets the other.
    whole = dist.group.WORLD
    compared = whole if whole is not None and group.group_desc in (CALLS, GRADIENTS) else group
    collective, mine = TorchCollective.over(compared), hash_of(call)
    if collective.add_number(mine) != mine * group.size():
        collective.progress = _comparing[-1][0]
        raise difference(collective, call)


def _operands(name: str, value: Any, shown: _Operator) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{name}: {str(value.dtype).removeprefix('torch.')}" + (
            "" if shown.only_dtypes else f" {tuple(value.shape)}"
        )
    elif isinstance(value, list):
        for each in value:
            yield from _operands(name, each, shown)
    else:
        yield f"{name}: {value}"
