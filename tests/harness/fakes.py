"""Our fakes. Each passes the contract of its role (`tests/contracts/`), like the real ones.

`run_threads(4, body)` runs a body on four ranks that are threads of this process, in milliseconds: for tests of what
is built on collectives. There is no process group.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import Store

from fabric.strategies.collectives.collective import (
    CollectiveError,
    ReduceOp,
    check_peer,
    check_slices,
    check_split,
)
from fabric.strategies.collectives.dtypes import from_reduced, to_reducible
from fabric.strategies.collectives.fabric_calls_check import check_call
from fabric.strategies.collectives.objects import CarriesObjects
from fabric.strategies.tensors.packing import check_dense

R = TypeVar("R")

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "mean": lambda stacked: stacked.sum(0, dtype=stacked.dtype),  # divided in `from_reduced`
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
}


@final
class Meeting:
    """Exchanges objects between the ranks of one `ThreadCollective`."""

    def __init__(self, size: int, timeout_seconds: float = 20.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.mail = {(src, dst): queue.Queue[Tensor]() for src in range(size) for dst in range(size)}
        self.store = HashStore()
        self._places: list[Any] = [None] * size
        self._all_here = threading.Barrier(size)

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """All-gather objects over the threads. All ranks call it."""
        self._places[rank] = mine
        self._wait(rank)
        brought = list(self._places)
        self._wait(rank)  # before all have read the objects, none writes the next one
        return brought

    def leave(self) -> None:
        """Make the others fail at once, instead of waiting for a rank that has failed."""
        self._all_here.abort()

    def _wait(self, rank: int) -> None:
        try:
            self._all_here.wait(self.timeout_seconds)
        except threading.BrokenBarrierError as error:
            raise CollectiveError(f"A rank left, or was later than {self.timeout_seconds:g} s.", rank=rank) from error


@final
class ThreadCollective(CarriesObjects):
    """Ranks that are threads of one process. `calls`: the operations so far, in order."""

    def __init__(self, meeting: Meeting, rank: int, *, is_part: bool = False) -> None:
        self.calls: list[str] = []
        self._meeting, self._rank, self._is_part = meeting, rank, is_part
        self._parts: dict[tuple[int, ...], ThreadCollective | None] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def setup(self) -> None:
        self._exchange("setup", None)

    def teardown(self) -> None:
        self._parts.clear()

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_peer("broadcast", "src", src, self.size)
        sent = self._exchange("broadcast", _copied(tensor) if self._rank == src else None)[src]
        return tensor.detach() if self._rank == src else sent.clone()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        wires = self._exchange("all_reduce", to_reducible(tensor, op, copy=True))
        return from_reduced(_REDUCTIONS[op](torch.stack(wires)), op, tensor.dtype, self.size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_gather", _copied(tensor)))

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        check_slices("reduce_scatter", tensor, self.size)
        wires = self._exchange("reduce_scatter", to_reducible(tensor, op, copy=True))
        mine = torch.stack([wire[self._rank] for wire in wires])
        return from_reduced(_REDUCTIONS[op](mine), op, tensor.dtype, self.size)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        check_slices("all_to_all", tensor, self.size)
        return torch.stack([sent[self._rank] for sent in self._exchange("all_to_all", _copied(tensor))])

    def send(self, tensor: Tensor, dst: int) -> None:
        check_peer("send", "dst", dst, self.size, me=self._rank)
        self.calls.append("send")
        self._meeting.mail[self._rank, dst].put(_copied(tensor))

    def recv(self, like: Tensor, src: int) -> Tensor:
        check_peer("recv", "src", src, self.size, me=self._rank)
        self.calls.append("recv")
        return self._meeting.mail[src, self._rank].get(timeout=self._meeting.timeout_seconds)

    def split(self, ranks: Sequence[int]) -> ThreadCollective | None:
        check_split(ranks, self.size, is_part=self._is_part)
        key = tuple(ranks)
        if key not in self._parts:
            check_call(self, f"split({list(ranks)})")
            table = Meeting(len(key), self._meeting.timeout_seconds) if self._rank == key[0] else None
            table = self._exchange("split", table)[key[0]]
            self._parts[key] = None
            if self._rank in key:
                self._parts[key] = ThreadCollective(table, key.index(self._rank), is_part=True)
        return self._parts[key]

    def store(self) -> Store | None:
        return self._meeting.store if self.size > 1 else None

    def _exchange(self, operation: str, mine: Any) -> list[Any]:
        self.calls.append(operation)
        return self._meeting.exchange(self._rank, mine)


def run_threads(size: int, body: Callable[..., R], *args: Any) -> list[R]:
    """Call `body(collective, *args)` on `size` ranks, and return their results, in rank order.

    Raises the error of the first rank that failed by itself, not because another one left.
    """
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        collective = ThreadCollective(meeting, rank)
        try:
            collective.setup()
            results[rank] = body(collective, *args)
            collective.teardown()
        except BaseException as error:
            errors.append(error)
            meeting.leave()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _copied(tensor: Tensor) -> Tensor:
    check_dense(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)
