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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fabric.launchers.watch.table import CALLS, GRADIENTS
from fabric.strategies.collectives.fabric_calls_check import difference, hash_of, is_comparing, is_in_a_started_thread
from fabric.strategies.collectives.process_group import TorchCollective, sum_message

OPERATORS: Mapping[str, tuple[str, ...]] = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "_allgather_base_": ("all_gather_into_tensor", "input_tensor"),
    "allgather_coalesced_": ("all_gather_coalesced", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", "inputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "inputs"),
    "broadcast_": ("broadcast", "tensors", "root_rank"),
    "reduce_": ("reduce", "tensors", "root_rank"),
    "gather_": ("gather", "input_tensors", "root_rank"),
    "gather_into_tensor_": ("gather_into_tensor", "input_tensor", "root_rank"),
    "scatter_": ("scatter", "output_tensors", "root_rank"),
    "alltoall_base_": ("all_to_all_single", "input"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "barrier": ("barrier",),
}
"""The collectives of torch 2.9 to 2.14, which has `gather_into_tensor_` first: how each is shown, and the arguments in
its schema that must be equal on all ranks, tensors by shape and dtype. In an all-to-all shapes may differ."""
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


def _kernel(operator: Any, shown: Sequence[str] | None) -> Callable[..., Any]:
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


def _compare(group: ProcessGroup, shown: Sequence[str], given: Mapping[str, Any]) -> None:
    if group.size() == 1 or is_comparing() or "cpu:" not in dist.get_backend_config(group):
        return
    words, *names = shown
    only_dtypes = words.startswith("all_to_all")
    operands = [line for name in names for line in _operands(name, given[name], only_dtypes)]
    call = "\n".join([words, *operands])
    # Gradients are compared with the program's own calls, so that both raise where one meets the other.
    whole = dist.group.WORLD
    compared = whole if whole is not None and group.group_desc in (CALLS, GRADIENTS) else group
    collective, mine = TorchCollective.over(compared), hash_of(call)
    if collective.add_number(mine) != mine * group.size():
        collective.progress = _comparing[-1][0]
        raise difference(collective, call)


def _operands(name: str, value: Any, only_dtypes: bool) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _operands(name, each, only_dtypes)
    elif isinstance(value, Tensor):
        shape = "" if only_dtypes else f" {tuple(value.shape)}"
        yield f"{name}: {str(value.dtype).removeprefix('torch.')}{shape}"
    else:
        yield f"{name}: {value}"
