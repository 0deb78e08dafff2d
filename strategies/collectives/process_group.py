"""Collectives over `torch.distributed`: gloo, nccl, and every other backend of torch.

The only file that uses torch's collectives, whose names differ between releases. Data that is not reduced is sent as
bytes, and every failure of torch becomes a `CollectiveError` with the call, its tensor, and how long it waited. gloo
aborts the process if ranks send tensors of different sizes. `nested.py` and `objects.py` compare calls beforehand
(`fabric_calls_check.py`); the methods here do not: their callers know that the shapes are equal.

# Note [Gradients have a group of their own]
A call that only some ranks make, such as a metric on rank 0, is matched with whatever the others send next on the same
process group. Mostly these are gradients, of another size: gloo aborts. If they are sent on another group, both wait,
and the table of the hang shows it (`launchers/watch`). Torch connects the ranks of that group when they first send to
each other, so it costs little: 1 ms for 64 ranks, where it took 290 ms to connect all pairs (two cores, torch 2.13).
On an accelerator it is the other way round: the process group of all ranks, on which FSDP's meshes and FairScale send,
is that of gradients, and the calls of this class have the other one. NCCL splits it off with a communicator of its own.

# Note [Groups while forked processes run]
A worker of a DataLoader is forked and holds copies of gloo's sockets. If gloo destroys a group while another rank does,
and such a process runs, an event may reach a connection that is closed, and gloo ends the process by SIGABRT
(`state_ <= CONNECTED`; in up to half of the jobs of two ranks that keep a worker, torch 2.13). So the groups are then
removed from torch and kept in memory, until no such process runs or this one ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from fabric.launchers.environments.defaults import default
from fabric.launchers.process.network import require_interfaces
from fabric.launchers.rendezvous.join import join
from fabric.launchers.watch.table import CALLS, GRADIENTS
from fabric.launchers.world import World
from fabric.strategies.collectives.collective import (
    CollectiveError,
    ReduceOp,
    check_peer,
    check_slices,
    check_split,
    forget_in_forks,
    in_a_fork,
)
from fabric.strategies.collectives.dtypes import from_reduced, to_reducible
from fabric.strategies.collectives.fabric_calls_check import check_call
from fabric.strategies.collectives.objects import CarriesObjects
from fabric.strategies.tensors.packing import Spec, as_bytes

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store

_LOGGER = logging.getLogger("fabric")

# torch 2.13 deprecates the old names of these two; 2.9 has only those.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_KEPT: set[ProcessGroup] = set()
"""Groups that were removed from torch while forked processes held copies of their sockets."""

_OPS: dict[ReduceOp, Any] = {op: getattr(dist.ReduceOp, op.upper()) for op in ("sum", "min", "max", "product")}
_OPS["mean"] = dist.ReduceOp.SUM  # divided in `from_reduced`


@final
class TorchCollective(CarriesObjects):
    """All ranks of a world, over torch's default process group, which DDP and FSDP use as well.

    `backend`: torch's name ("gloo", "nccl"), for tensors on `device`. If that is not the CPU, gloo is added for CPU
    tensors. `timeout_seconds`: how long a call waits for the other ranks. The default is torch's for gloo.
    """

    def __init__(self, world: World, backend: str, *, device: torch.device, timeout_seconds: float = 1800.0) -> None:
        self._world = world
        self.device: torch.device = device
        self._backends = f"cpu:gloo,{device.type}:{backend}" if device.type != "cpu" and ":" not in backend else backend
        self._timeout_seconds = timeout_seconds
        self._store: Store | None = None
        self._group: ProcessGroup | None = None
        self._owns_group = self._is_part = False
        self._rank, self._size = world.rank, world.size
        self._splits: dict[tuple[int, ...], TorchCollective | None] = {}
        self._for_gradients: TorchCollective | None = None
        self._is_in_a_fork = False
        self._unread: Callable[[], None] | None = None
        """Receives the sum of `add_number_later`."""
        forget_in_forks(self)

    @classmethod
    def over(cls, group: ProcessGroup) -> TorchCollective:
        """The ranks of an existing process group, which `teardown` does not destroy."""
        collective = cls(World(), "gloo", device=torch.device("cpu"))
        collective._group, collective._rank, collective._size = group, group.rank(), group.size()
        return collective

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def process_group(self) -> ProcessGroup:
        return self._joined("process_group")

    def setup(self) -> None:
        """Connect to the other ranks. An existing process group is used, and not destroyed by `teardown`.

        Raises: TimeoutError: a rank did not arrive; CollectiveError: torch could not connect the ranks, or the existing
        group has another size, rank or backend.
        """
        if "gloo" in self._backends:
            require_interfaces(os.environ)
        store = join(self._world, self._timeout_seconds, _LOGGER.warning)
        self._is_in_a_fork = False
        self._store = PrefixStore("messages", store) if self._size > 1 else None
        if dist.is_initialized():
            self._check_group_found()
        else:
            self._make_group(store)
            self._owns_group = True
        self._group = dist.group.WORLD
        if self._size > 1:  # see Note [Gradients have a group of their own]
            is_host = self.device.type == "cpu"
            with default(os.environ, "TORCH_GLOO_LAZY_INIT", "1"):
                other = self._for_gradients = self._part(tuple(range(self._size)), GRADIENTS if is_host else CALLS)
            if not is_host:
                assert other is not None
                other._group, self._group = self._group, other._group
                other._owns_group, self._owns_group = self._owns_group, True

    def teardown(self) -> None:
        if not self._is_part:  # a part is torn down with its whole
            self._end()

    def _end(self) -> None:
        for part in (*self._splits.values(), self._for_gradients):
            if part is not None:
                part._end()
        self._splits.clear()
        self._for_gradients = None
        if self._group is not None and self._owns_group and dist.is_initialized():
            # See Note [Groups while forked processes run].
            if multiprocessing.active_children():
                _KEPT.update(getattr(getattr(distributed_c10d, "_world", None), "pg_map", [self._group]))
            else:
                _KEPT.clear()
            dist.destroy_process_group(self._group)
        self._group = self._store = None

    def forget(self) -> None:
        if self._group is not None:
            self._group, self._store, self._is_in_a_fork = None, None, True

    def barrier(self) -> None:
        self._run("barrier", None, _barrier)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_peer("broadcast", "src", src, self._size)
        if self._rank == src:
            self._run("broadcast", tensor, dist.broadcast, as_bytes(tensor), group_src=src)
            return tensor.detach()
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._run("broadcast", tensor, dist.broadcast, as_bytes(received), group_src=src)
        return received

    def fill(self, tensors: Sequence[Tensor]) -> None:
        under_way = []
        for tensor in tensors:
            whole = tensor.data.resolve_conj().resolve_neg().contiguous()  # .data: autograd does not record it
            work = self._run("fill", tensor, dist.broadcast, as_bytes(whole), async_op=True, group_src=0)
            under_way.append((tensor, whole, work))
        for tensor, whole, work in under_way:
            self._run("fill", tensor, _wait, work)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(whole)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        operand = to_reducible(tensor, op, copy=True)
        self._run("all_reduce", tensor, dist.all_reduce, operand, _OPS[op])
        return from_reduced(operand, op, tensor.dtype, self._size)

    def start_all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Callable[[], Tensor]:
        operand = to_reducible(tensor, op, copy=True)
        work = self._run("all_reduce", tensor, dist.all_reduce, operand, _OPS[op], async_op=True)

        def finish() -> Tensor:
            self._run("all_reduce", tensor, _wait, work)
            return from_reduced(operand, op, tensor.dtype, self._size)

        return finish

    def add_number(self, number: float) -> float:
        message = _message([number])
        self._run("all_reduce", message, sum_message, message)
        return message.item()

    def add_number_later(self, number: float, then: Callable[[float], None]) -> None:
        finish = self.start_add_numbers([number])
        self._unread = lambda: then(*finish())

    def start_add_numbers(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        message = _message(numbers)
        work = self._run("all_reduce", message, dist.all_reduce, message, async_op=True)

        def finish() -> list[float]:
            self._run("all_reduce", message, _wait, work)
            return message.tolist()

        return finish

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._run("all_gather", tensor, _all_gather, as_bytes(gathered), as_bytes(tensor))
        return gathered

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        gathered = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        work = self._run("all_gather", tensor, _all_gather, as_bytes(gathered), as_bytes(tensor), async_op=True)

        def finish() -> Tensor:
            self._run("all_gather", tensor, _wait, work)
            return gathered

        return finish

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        check_slices("reduce_scatter", tensor, self._size)
        operand = to_reducible(tensor, op, copy=False)
        reduced = torch.empty(operand.shape[1:], dtype=operand.dtype, device=operand.device)
        self._run("reduce_scatter", tensor, _reduce_scatter, reduced.view(-1), operand.view(-1), _OPS[op])
        return from_reduced(reduced, op, tensor.dtype, self._size)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        check_slices("all_to_all", tensor, self._size)
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._run("all_to_all", tensor, dist.all_to_all_single, as_bytes(received), as_bytes(tensor))
        return received

    def send(self, tensor: Tensor, dst: int) -> None:
        check_peer("send", "dst", dst, self._size, me=self._rank)
        self._run("send", tensor, dist.send, as_bytes(tensor), group_dst=dst)

    def recv(self, like: Tensor, src: int) -> Tensor:
        check_peer("recv", "src", src, self._size, me=self._rank)
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._run("recv", like, dist.recv, as_bytes(received), group_src=src)
        return received

    def split(self, ranks: Sequence[int]) -> TorchCollective | None:
        check_split(ranks, self._size, is_part=self._is_part)
        key = tuple(ranks)
        if key not in self._splits:
            check_call(self, f"split({list(ranks)})")
            self._splits[key] = self._part(key)
        return self._splits[key]

    def for_gradients(self) -> TorchCollective:
        """See Note [Gradients have a group of their own]."""
        return self._for_gradients or self

    def store(self) -> Store | None:
        self._joined("store")
        return self._store

    def _make_group(self, store: Store) -> None:
        timeout = timedelta(seconds=self._timeout_seconds)
        hook = sys.excepthook
        # NCCL then connects at once, by the device, and splits groups off this connection.
        connects = self._size > 1 and _by_device(self._backends).get(self.device.type) == "nccl"
        try:
            dist.init_process_group(
                self._backends,
                store=store,
                rank=self._rank,
                world_size=self._size,
                timeout=timeout,
                device_id=self.device if connects else None,
            )
        except (AssertionError, RuntimeError, ValueError) as error:  # torch asserts that the backend is known
            raise self._failure(f"init_process_group({self._backends!r})", None, error) from error
        finally:
            sys.excepthook = hook  # torch's hook prefixes each line with the rank; the launcher does this already
        # gloo's ranks return from connecting one by one; one that exits at once resets connections that are not ready
        # yet.
        if store.add("num_connected", 1) == self._size:
            store.set("connected", "")
        store.wait(["connected"])

    def _part(self, ranks: tuple[int, ...], description: str | None = None) -> TorchCollective | None:
        # Every rank creates every group. With `new_group(use_local_synchronization=True)` the others need not, but the
        # group's name then counts the groups that a rank has created (torch 2.13): ranks whose counts differ wait for
        # each other forever.
        try:
            group = dist.new_group(
                list(ranks), timeout=timedelta(seconds=self._timeout_seconds), group_desc=description
            )
        except (RuntimeError, ValueError) as error:
            raise self._failure("split", None, error) from error
        if self._rank not in ranks:
            return None
        part = TorchCollective(self._world, self._backends, device=self.device, timeout_seconds=self._timeout_seconds)
        part._rank, part._size = ranks.index(self._rank), len(ranks)
        part._group = group
        if self._store is not None and part._size > 1:
            part._store = PrefixStore(f"split/{'-'.join(map(str, ranks))}", self._store)
        part._owns_group = part._is_part = True
        return part

    def _joined(self, operation: str) -> ProcessGroup:
        if self._group is None:
            if self._is_in_a_fork:
                raise CollectiveError(in_a_fork(operation, self._rank), rank=self._rank)
            raise CollectiveError(
                f"`{operation}` on rank {self._rank} of {self._size}, which is not connected to the other ranks: call "
                "`setup()` first, and nothing after `teardown()`.",
                rank=self._rank,
            )
        return self._group

    def _run(self, operation: str, tensor: Tensor | None, function: Callable[..., Any], *args: Any, **to: int) -> Any:
        group = self._joined(operation)
        if self._unread is not None and (tensor is None or tensor.device.type == "cpu"):
            read, self._unread = self._unread, None
            read()
        try:
            return function(*args, group=group, **to)
        except CollectiveError:  # of `torch_calls_check.py`
            raise
        except (RuntimeError, ValueError) as error:
            raise self._failure(operation, tensor, error) from error

    def _failure(self, operation: str, tensor: Tensor | None, error: Exception) -> CollectiveError:
        of = "" if tensor is None else f" of a tensor {Spec.of(tensor)}"
        # The timeout of a group that the program created is not known.
        waits = f" (a call waits {self._timeout_seconds:g} s for the other ranks)" if self._owns_group else ""
        return CollectiveError(
            f"`{operation}`{of} failed on rank {self._rank} of {self._size}{waits}: {str(error).strip()}\nCheck the "
            "output of the other ranks: one of them ended, was late, or called something else.",
            rank=self._rank,
        )

    def _check_group_found(self) -> None:
        """Raise unless the existing process group equals the one that this collective would have created."""
        found = (dist.get_rank(), dist.get_world_size())
        config = dist.get_backend_config()
        if found == (self._rank, self._size) and _by_device(self._backends).items() <= _by_device(config).items():
            return
        raise CollectiveError(
            f"A process group exists already: rank {found[0]} of {found[1]} over {config!r}. This fabric is rank "
            f"{self._rank} of {self._size} and uses {self._backends!r}. Leave `init_process_group` to the "
            f"fabric, or call `torch.distributed.init_process_group({self._backends!r}, ...)` with the same ranks.",
            rank=self._rank,
        )


def _barrier(group: ProcessGroup) -> None:
    """`dist.barrier`, always over the hosts: torch's own goes to the device that the group is bound to."""
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    group.barrier(options).wait()


# Note [Cold Python]
# After a rank has waited for the others, its caches are cold: Python that takes 5 us in a loop takes up to 70 us there.
# An all-reduce of one number over gloo takes 220 us, so each frame and each torch function counts there.


def _message(numbers: Sequence[float]) -> Tensor:
    """Not by `torch.tensor`, which within DeepSpeed's `zero.Init` returns another dtype."""
    return torch.frombuffer(array("d", numbers), dtype=torch.float64)


def sum_message(message: Tensor, group: ProcessGroup) -> None:
    """The all-reduce of a comparison: not compared itself, see `torch_calls_check.py`."""
    group.allreduce([message]).wait()


def _wait(work: dist.Work, group: ProcessGroup) -> None:
    work.wait()


def _by_device(backends: str) -> dict[str, str]:
    """ "cpu:gloo,cuda:nccl" -> {"cpu": "gloo", "cuda": "nccl"}; a plain "gloo" is for the CPU."""
    pairs = (entry.rpartition(":") for entry in backends.split(","))
    return {device or "cpu": backend for device, _, backend in pairs}
