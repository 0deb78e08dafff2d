"""A context in which collectives of torch.distributed send nothing: each is answered as if all ranks were this one.

For forwards and backwards in which one rank may run out of memory while the others go on (`Fabric.find_batch_size`): a
rank that waits for no other cannot be left waiting. Operands are allocated and written as in the real collective, so
memory is as in training; an all-gather returns this rank's values once for each rank, a sum is this rank's values times
the number of ranks, and what would be received is zero.

One kernel for each operator of `c10d`, as in `torch_calls_check.py`, on every group. Calls of threads that the program
starts are sent as usual.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fabric.strategies.collectives.fabric_calls_check import is_in_a_started_thread
from fabric.strategies.collectives.torch_calls_check import OPERATORS


@contextmanager
def answered_alone(group: ProcessGroup) -> Iterator[None]:
    """Context: all collectives of this process are answered alone. Ranks: all of `group`, which has a barrier first."""
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    done = group.barrier(options)
    done.wait()
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # the sanitizer may have a kernel, too
        for name in (*OPERATORS, "send", "recv_", "recv_any_source_"):
            if overloads := getattr(torch.ops.c10d, name, None):
                kernel = _kernel(overloads.default, name, done.boxed())
                library.impl(name, kernel, "BackendSelect", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        del library  # which removes its kernels


def _kernel(operator: Any, name: str, done: Any) -> Callable[..., Any]:
    names, thread = [argument.name for argument in operator._schema.arguments], threading.get_ident()
    num_returns = len(operator._schema.returns)

    @torch.no_grad()
    def answer(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread and is_in_a_started_thread():
            return operator.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        _write(name, given, ProcessGroup.unbox(given["process_group"]))
        return (args[0], done) if num_returns > 1 else done

    return answer


def _write(name: str, given: Mapping[str, Any], group: ProcessGroup) -> None:
    """Write the results of a collective into its operands."""
    first, size = next(iter(given.values())), group.size()
    own = next((value for argument, value in given.items() if argument.startswith("input")), ())
    if "gather" in name:
        for pieces, mine in zip(_in_pieces(first, size), _listed(own), strict=False):  # `gather`: rank 0 alone has some
            for piece in pieces:
                piece.copy_(mine.view_as(piece))
    elif "scatter" in name:
        for mine, pieces in zip(_listed(first), _in_pieces(own, size), strict=False):
            mine.copy_(pieces[group.rank()].view_as(mine))
    elif name.startswith(("alltoall", "recv")):
        for place, received in enumerate(_listed(first)):
            sent = _listed(own)[place].view(-1) if own != () else received.new_zeros(1)
            received.copy_(sent.view_as(received)) if sent.numel() == received.numel() else received.zero_()
    if "reduce" in name and given["reduce_op"].op() == dist.ReduceOp.SUM:
        for mine in _listed(first):
            mine.mul_(size)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _in_pieces(tensors: Any, size: int) -> list[list[Tensor]]:
    """For each tensor its pieces, one a rank."""
    return [list(each.view(size, -1)) if isinstance(each, Tensor) else each for each in _listed(tensors)]
