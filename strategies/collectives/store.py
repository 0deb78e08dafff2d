"""Collectives over the key-value store of the rendezvous: slow, but available wherever there is a store.

For ranks without a backend between them, such as a subset of an XLA world, whose own collectives run over all devices.
Every call gathers the data of all ranks, so each rank receives W times what it sends. Results are on the device of the
input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from fabric.strategies.collectives.call_check import check_call, to_bytes, to_tensor
from fabric.strategies.collectives.collective import (
    CollectiveError,
    ReduceOp,
    check_peer,
    check_slices,
    check_split,
)
from fabric.strategies.collectives.dtypes import from_reduced, reduce_stacked, to_reducible
from fabric.strategies.collectives.objects import CarriesObjects
from fabric.strategies.tensors.packing import Spec, as_bytes

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PART_BYTES = 4 * 2**20


@final
class StoreCollective(CarriesObjects):
    """Rank `rank` of `size` ranks, over a store with keys of their own."""

    def __init__(self, store: Store, rank: int, size: int, *, is_part: bool = False) -> None:
        self._store, self._rank, self._size, self._is_part = store, rank, size, is_part
        self._num_calls = self._num_bytes = 0
        self._num_sent: dict[tuple[int, int], int] = {}
        self._parts: dict[tuple[int, ...], StoreCollective | None] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def setup(self) -> None:
        self.barrier()

    def teardown(self) -> None:
        self._parts.clear()

    def barrier(self) -> None:
        self._gather("barrier", b"")

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_peer("broadcast", "src", src, self._size)
        mine = _to_bytes(tensor) if self._rank == src else b""
        sent = self._gather("broadcast", mine)[src]
        return tensor.detach() if self._rank == src else _from_bytes(sent, tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        operand = to_reducible(tensor, op, copy=True)
        return from_reduced(reduce_stacked(self._stacked("all_reduce", operand), op), op, tensor.dtype, self._size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._stacked("all_gather", tensor)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        check_slices("reduce_scatter", tensor, self._size)
        wires = self._stacked("reduce_scatter", to_reducible(tensor, op, copy=True))
        return from_reduced(reduce_stacked(wires[:, self._rank], op), op, tensor.dtype, self._size)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        check_slices("all_to_all", tensor, self._size)
        return self._stacked("all_to_all", tensor)[:, self._rank].clone(memory_format=torch.contiguous_format)

    def send(self, tensor: Tensor, dst: int) -> None:
        check_peer("send", "dst", dst, self._size, me=self._rank)
        self._put(self._message_key(self._rank, dst), _to_bytes(tensor))

    def recv(self, like: Tensor, src: int) -> Tensor:
        check_peer("recv", "src", src, self._size, me=self._rank)
        key = self._message_key(src, self._rank)
        try:
            sent = self._get(key)
        except RuntimeError as error:
            raise self._failure(f"recv from rank {src} of a tensor {Spec.of(like)}", error) from error
        self._delete(key, len(sent))
        return _from_bytes(sent, like)

    def split(self, ranks: Sequence[int]) -> StoreCollective | None:
        check_split(ranks, self._size, is_part=self._is_part)
        key = tuple(ranks)
        if key not in self._parts:
            check_call(self, f"split({list(ranks)})")
            self._parts[key] = None
            if self._rank in key:
                own = PrefixStore(f"split/{'-'.join(map(str, key))}", self._store)
                self._parts[key] = StoreCollective(own, key.index(self._rank), len(key), is_part=True)
        return self._parts[key]

    def store(self) -> Store | None:
        return PrefixStore("messages", self._store) if self._size > 1 else None

    def _stacked(self, operation: str, tensor: Tensor) -> Tensor:
        return torch.stack([_from_bytes(sent, tensor) for sent in self._gather(operation, _to_bytes(tensor))])

    def _gather(self, operation: str, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order."""
        call, self._num_calls = self._num_calls, self._num_calls + 1
        try:
            self._put(f"{call}/{self._rank}", mine)
            brought = [self._get(f"{call}/{rank}") for rank in range(self._size)]
        except RuntimeError as error:
            raise self._failure(operation, error) from error
        if call > 0:  # a rank that writes this call has read the previous one
            self._delete(f"{call - 1}/{self._rank}", self._num_bytes)
        self._num_bytes = len(mine)
        return brought

    def _put(self, key: str, content: bytes) -> None:
        """Store the length under the key, after the chunks: torch's store closes a connection that sends over 8 MiB."""
        for start in range(0, len(content), PART_BYTES):
            self._store.set(f"{key}/{start}", content[start : start + PART_BYTES])  # type: ignore[arg-type]
        self._store.set(key, str(len(content)))

    def _get(self, key: str) -> bytes:
        length = int(self._store.get(key))
        return b"".join(self._store.get(f"{key}/{start}") for start in range(0, length, PART_BYTES))

    def _delete(self, key: str, length: int) -> None:
        for part in (key, *(f"{key}/{start}" for start in range(0, length, PART_BYTES))):
            self._store.delete_key(part)

    def _message_key(self, src: int, dst: int) -> str:
        """The key of the next message from one rank to another."""
        number = self._num_sent.get((src, dst), 0)
        self._num_sent[src, dst] = number + 1
        return f"send/{src}/{dst}/{number}"

    def _failure(self, operation: str, error: Exception) -> CollectiveError:
        return CollectiveError(
            f"`{operation}` through the store failed on rank {self._rank} of {self._size}: {str(error).strip()}\n"
            "Check the output of the other ranks: one of them ended, was late, or called something else.",
            rank=self._rank,
        )


def _to_bytes(tensor: Tensor) -> bytes:
    return to_bytes(as_bytes(tensor.to("cpu")))


def _from_bytes(content: bytes, like: Tensor) -> Tensor:
    flat = to_tensor(bytearray(content)).clone()  # a buffer of torch's own, aligned for any dtype
    return flat.view(like.dtype).view(like.shape).to(like.device)
