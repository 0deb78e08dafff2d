"""A loader that only rank 0 reads: it sends each rank whole batches, round-robin.

For data that cannot be split, or that one process alone can read. At each step rank 0 broadcasts a description of
the batches (containers, shapes and dtypes: a few hundred bytes), and sends each rank the tensors of its batch. Both
use a separate process group, so that they are not matched with collectives of the loop. An error of the loader is
raised on all ranks. Rank 0 reads one step at a time; workers of its loader read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from fabric.strategies.data.partition import warn_of_rest
from fabric.strategies.data.share import Share
from fabric.strategies.data.take import take
from fabric.strategies.tensors.nests import is_tensor, map_leaves


class DispatchError(RuntimeError):
    """The loader that rank 0 reads for this rank raised an error; the message has its type and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """How rank 0 sends batches. `broadcast` is called by all ranks, `send` and `receive` by the two ranks involved."""

    rank: int
    shares: Sequence[int]
    """The share that each rank reads, by rank: ranks that hold parts of one model have the same share."""
    broadcast: Callable[[Any], Any]
    """Returns the object of rank 0 on every rank."""
    send: Callable[[Tensor, int], None]
    """Sends a tensor to a rank."""
    receive: Callable[[Tensor], Tensor]
    """Receives a tensor from rank 0, of the shape and dtype of the argument."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Placeholder for a tensor that is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _is_sent(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, _Sent))


@final
class Dispatched:
    """This rank's batches of a loader that rank 0 reads. Ranks: all iterate, and leave their loop at the same step."""

    def __init__(
        self,
        loader: Iterable[Any],
        channel: Channel,
        *,
        starting: Callable[[], AbstractContextManager[None]],
        keeps_tail: bool,
    ) -> None:
        """`starting`: entered to begin iterating over `loader`. `keeps_tail`: if the last batches are too few for all
        ranks, the first ranks get them; otherwise they are dropped with a warning."""
        self._loader, self._channel, self._starting = loader, channel, starting
        self._keeps_tail = keeps_tail
        self._num_shares = max(channel.shares) + 1

    def __iter__(self) -> Iterator[Any]:
        return self._read() if self._channel.rank == 0 else self._receive()

    def _read(self) -> Iterator[Any]:
        """Rank 0: read a batch for each share, broadcast their descriptions, and send each rank its tensors."""
        channel = self._channel
        batches: Iterator[Any] | None = None
        while True:
            try:
                if batches is None:
                    with self._starting():
                        batches = iter(self._loader)
                step = take(batches, self._num_shares)
            except Exception as error:
                channel.broadcast(f"{type(error).__name__}: {error}")
                raise
            if len(step) < self._num_shares and not self._keeps_tail:
                if step:
                    warn_of_rest(len(step), Share(count=self._num_shares))
                step = []
            tensors: list[list[Tensor]] = [[] for _ in step]
            channel.broadcast([_described(batch, found) for batch, found in zip(step, tensors, strict=True)])
            for rank, share in enumerate(channel.shares):
                for tensor in tensors[share] if rank > 0 and share < len(step) else ():
                    channel.send(tensor, rank)
            if step:
                yield step[channel.shares[0]]
            if len(step) < self._num_shares:
                return

    def _receive(self) -> Iterator[Any]:
        channel = self._channel
        share = channel.shares[channel.rank]
        while True:
            step = channel.broadcast(None)
            if isinstance(step, str):
                raise DispatchError(f"The loader that rank 0 reads for all ranks raised {step}")
            if share < len(step):
                yield map_leaves(self._filled, step[share], is_leaf=_is_sent)
            if len(step) < self._num_shares:
                return

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Sent):
            return leaf
        like = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        return self._channel.receive(like) if like.numel() else like


def _described(batch: Any, found: list[Tensor]) -> Any:
    """The batch with a placeholder for each tensor. Tensors to be sent are appended to `found`."""

    def describe(leaf: Any) -> Any:
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
            return leaf
        if leaf.numel():
            found.append(leaf.detach().contiguous())
        return _Sent(tuple(leaf.shape), leaf.dtype)

    return map_leaves(describe, batch, is_leaf=is_tensor)
