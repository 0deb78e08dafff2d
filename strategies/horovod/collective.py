"""Collectives over Horovod, matched by issue order, with a timeout.

# Note [Calls have numbers for names]
Horovod matches calls of ranks by name, in any order, and waits forever for a name that another rank never submits; its
stall check raises nothing (0.28.1). So the n-th call of a collective is named n on every rank. If shapes, dtypes,
roots or reductions differ, Horovod raises on all ranks. But the kind of operation is part of the name, so ranks that
call different operations wait forever, as does a rank whose peer calls none. So we wait for the call ourselves: a rank
that has waited a while writes the call into the store, and reads there what the other ranks wait for.

Broadcast, all-gather and all-to-all transfer bytes. Horovod reduces float16, float32, float64, int32 and int64; other
dtypes are cast to one of these that holds all their values. Horovod has no `send` and no `recv`.
"""

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, cast, final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from fabric.launchers.environments.horovod import place_in_environment
from fabric.launchers.process.network import interface_for
from fabric.launchers.rendezvous.join import join
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
from fabric.strategies.horovod.timeout import Watch
from fabric.strategies.tensors.packing import Spec, as_bytes

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


_LOGGER = logging.getLogger("fabric")

_OPS = {
    "sum": "Sum",
    "mean": "Sum",
    "min": "Min",
    "max": "Max",
    "product": "Product",
}  # mean: divided in `from_reduced`
_WIDER = {torch.bfloat16: torch.float32, torch.uint8: torch.int32, torch.int8: torch.int32}

OF_ALL_RANKS = "Horovod has no `send` and `recv`. Use an operation of all ranks: `broadcast`, `all_to_all`."


@final
class HorovodCollective(CarriesObjects):
    """All ranks of a world, over Horovod's own controller (gloo).

    `timeout_seconds`: how long a call waits for the other ranks.
    Once a rank has called `teardown` or ended, calls of the others raise CollectiveError.
    """

    def __init__(self, world: World, *, timeout_seconds: float = 1800.0) -> None:
        self._world, self._timeout_seconds = world, timeout_seconds
        self._ranks = tuple(range(world.size))
        self._is_part = False
        self._store: Store | None = None
        self._watch: Watch | None = None
        self._hvd: Any = None
        self._process_set: Any = None
        self._server: RendezvousServer | None = None
        self._address = ("", 0)
        self._num_calls = 0
        self._parts: dict[tuple[int, ...], HorovodCollective | None] = {}
        self._is_in_a_fork = False
        forget_in_forks(self)

    @property
    def rank(self) -> int:
        return self._ranks.index(self._world.rank)

    @property
    def size(self) -> int:
        return len(self._ranks)

    def setup(self) -> None:
        """Connect to the other ranks. Rank 0 runs Horovod's rendezvous server until its `teardown`.

        Raises: TimeoutError: a rank did not arrive; CollectiveError: Horovod could not connect the ranks, or is
        initialised already.
        """
        import horovod.torch as hvd

        if hvd.is_initialized():
            raise CollectiveError(
                "Horovod is initialised already, by the program or by a fabric that is still open. Leave `hvd.init()` "
                "to the fabric, and close the other one first.",
                rank=self._world.rank,
            )
        store = join(self._world, self._timeout_seconds, _LOGGER.warning)
        self._is_in_a_fork = False
        self._address = self._serve(store)
        try:
            with self._place():
                hvd.init()
        except (RuntimeError, ValueError) as error:
            self._end_serving()
            raise self._failure("hvd.init", None, error) from error
        self._join(hvd, hvd.global_process_set, store)

    def teardown(self) -> None:
        if self._is_part or self._hvd is None:  # a subgroup ends with the collective that it was split from
            return
        self._hvd.shutdown()
        for part in (self, *(part for part in self._parts.values() if part is not None)):
            part._hvd = part._process_set = part._store = part._watch = None
        self._parts.clear()
        self._end_serving()

    def forget(self) -> None:
        if self._hvd is not None:
            self._hvd = self._process_set = self._store = self._watch = self._server = None
            self._is_in_a_fork = True

    def barrier(self) -> None:
        self._all_reduce("barrier", torch.zeros(1, dtype=torch.int32, device="cpu"), "sum")

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_peer("broadcast", "src", src, self.size)
        root = self._ranks[src]
        if self.rank == src:
            self._run("broadcast", tensor, "broadcast_async", as_bytes(tensor), root_rank=root)
            return tensor.detach()
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._run("broadcast", tensor, "broadcast_async_", as_bytes(received), root_rank=root)
        return received

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        operand = to_reducible(tensor, op, copy=True)
        return from_reduced(self._all_reduce("all_reduce", operand, op), op, tensor.dtype, self.size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        # As one row: Horovod allows different sizes of the first dim, which must raise here.
        rows = self._run("all_gather", tensor, "allgather_async", as_bytes(tensor)[None])
        return _like(rows, tensor, (self.size, *tensor.shape))

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        check_slices("reduce_scatter", tensor, self.size)
        operand = to_reducible(tensor, op, copy=False)
        # Horovod's own reduce-scatter only sums. This one receives as many bytes per rank, and holds W slices.
        reduced = _reduce_stacked(self._all_to_all("reduce_scatter", operand), op)
        return from_reduced(reduced, op, tensor.dtype, self.size)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        check_slices("all_to_all", tensor, self.size)
        return self._all_to_all("all_to_all", tensor)

    def send(self, tensor: Tensor, dst: int) -> NoReturn:
        raise CollectiveError(f"`send` on rank {self.rank}: {OF_ALL_RANKS}", rank=self._world.rank)

    def recv(self, like: Tensor, src: int) -> NoReturn:
        raise CollectiveError(f"`recv` on rank {self.rank}: {OF_ALL_RANKS}", rank=self._world.rank)

    def split(self, ranks: Sequence[int]) -> "HorovodCollective | None":
        check_split(ranks, self.size, is_part=self._is_part)
        key = tuple(ranks)
        if key not in self._parts:
            check_call(self, f"split({list(ranks)})")
            self._parts[key] = self._part(key)
        return self._parts[key]

    def store(self) -> "Store | None":
        self._joined("store")
        return PrefixStore("messages", self._store) if self._store is not None and self.size > 1 else None

    def _serve(self, store: "Store") -> tuple[str, int]:
        """Start Horovod's rendezvous server on rank 0. Returns its address; the others read the port from the store."""
        at = self._world.rendezvous
        host = "127.0.0.1" if at is None or self._world.num_nodes == 1 else at.address
        if self._world.is_global_zero:
            self._server = RendezvousServer(host if self._world.num_nodes == 1 else "")
            store.set("horovod/port", str(self._server.port))
        return host, int(store.get("horovod/port"))

    def _end_serving(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _place(self) -> AbstractContextManager[None]:
        host, port = self._address
        return place_in_environment(
            self._world,
            address=host,
            port=port,
            interface=interface_for(self._world),
            timeout_seconds=self._timeout_seconds,
        )

    def _part(self, ranks: tuple[int, ...]) -> "HorovodCollective | None":
        """Add a process set. Ranks: all, not only `ranks`: Horovod numbers process sets in order of creation."""
        try:
            with self._place():
                process_set = self._process_set if ranks == self._ranks else self._hvd.add_process_set(list(ranks))
        except (RuntimeError, ValueError) as error:
            raise self._failure("split", None, error) from error
        if self._world.rank not in ranks:
            return None
        assert self._store is not None
        part = HorovodCollective(self._world, timeout_seconds=self._timeout_seconds)
        part._ranks, part._is_part = ranks, True
        part._join(self._hvd, process_set, PrefixStore(f"split/{'-'.join(map(str, ranks))}", self._store))
        return part

    def _join(self, hvd: Any, process_set: Any, store: "Store") -> None:
        self._hvd, self._process_set, self._store = hvd, process_set, store
        self._watch = Watch(PrefixStore("watch", store), self.rank, self.size, self._timeout_seconds)

    def _all_reduce(self, operation: str, operand: Tensor, op: str) -> Tensor:
        """Reduce the operand in place, or a cast copy of it if Horovod cannot reduce the dtype."""
        widened = operand.to(_WIDER.get(operand.dtype, operand.dtype))
        hvd = self._joined(operation)
        reduced = self._run(operation, operand, "allreduce_async_", widened, op=getattr(hvd, _OPS[op]))
        return cast(Tensor, reduced.to(operand.dtype))

    def _all_to_all(self, operation: str, tensor: Tensor) -> Tensor:
        rows = as_bytes(tensor).view(self.size, -1)
        received, _ = self._run(operation, tensor, "alltoall_async", rows)
        return _like(received, tensor, tensor.shape)

    def _run(self, operation: str, tensor: Tensor, function: str, operand: Tensor, **options: Any) -> Any:
        """Start a call of Horovod, wait for it and return its result. See Note [Calls have numbers for names]."""
        hvd = self._joined(operation)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        name = f"{'-'.join(map(str, self._ranks)) if self._is_part else 'all'}/{number}"
        try:
            start = getattr(hvd, function)
            handle = start(operand, name=name, process_set=self._process_set, **options)
            assert self._watch is not None
            self._watch.wait(lambda: hvd.poll(handle), operation, tensor, number)
            return hvd.synchronize(handle)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CollectiveError):
                raise
            raise self._failure(operation, tensor, error) from error

    def _joined(self, operation: str) -> Any:
        if self._hvd is None:
            if self._is_in_a_fork:
                raise CollectiveError(in_a_fork(operation, self.rank), rank=self._world.rank)
            raise CollectiveError(
                f"`{operation}` on rank {self.rank} of {self.size}, which has not met the other ranks: call "
                "`setup()` first, and nothing after `teardown()`.",
                rank=self._world.rank,
            )
        return self._hvd

    def _failure(self, operation: str, tensor: Tensor | None, error: Exception) -> CollectiveError:
        of = "" if tensor is None else f" of a tensor {Spec.of(tensor)}"
        return CollectiveError(
            f"`{operation}`{of} failed on rank {self.rank} of {self.size}: {str(error).strip()}\nCheck the output "
            "of the other ranks: one of them ended, or called something else.",
            rank=self._world.rank,
        )


def _like(content: Tensor, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """View received bytes as a tensor of this shape, with the dtype of `tensor`."""
    return content.view(-1).view(tensor.dtype).view(*shape)


@final
class RendezvousServer:
    """Horovod's rendezvous server, where ranks exchange their addresses: a key-value store over HTTP, run by rank 0.

    Horovod's launcher runs one in the process that starts the ranks. Ours is in rank 0, so that ranks may be started by
    any launcher: fork, script, torchrun, srun, mpirun. Serves from construction to `close`, on a port that the system
    chooses. `host`: "" for all interfaces.
    """

    def __init__(self, host: str) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self._server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="horovod-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _reduce_stacked(stacked: Tensor, op: ReduceOp) -> Tensor:
    """The reduction of the slices of a tensor, `(W, *S)` -> `(*S)`, by this rank (mean: sum)."""
    if op in ("min", "max"):
        return stacked.amin(0) if op == "min" else stacked.amax(0)
    return stacked.prod(0, dtype=stacked.dtype) if op == "product" else stacked.sum(0, dtype=stacked.dtype)
