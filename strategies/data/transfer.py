"""Batches to the device, whatever they are nested in; on an accelerator one batch ahead of the loop.

The copy of the next batch runs on a stream of its own while the device computes on the last. It overlaps where the
loader pins its memory; without, the host waits for each copy, as in a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from fabric.strategies.pytree import map_leaves


@runtime_checkable
class Movable(Protocol):
    """Anything that knows how to go to a device, as tensors, packed sequences and tokenised batches do."""

    def to(self, device: torch.device) -> Any:
        """The same on `device`."""


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`, in containers of the same types; the batch itself is left.

    Goes through what `map_leaves` knows for a container, and leaves to anything with a `to` method how it moves. A
    pinned tensor is copied without waiting; work queued on the current stream afterwards sees it.
    """

    def move_one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=device.type != "cpu" and leaf.device.type == "cpu" and leaf.is_pinned())
        return leaf.to(device) if _is_movable(leaf) else leaf

    return map_leaves(move_one, batch, is_leaf=_is_movable)


def _is_movable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or (isinstance(leaf, Movable) and not isinstance(leaf, type))


def movables(batch: Any) -> list[Any]:
    """What `move` moves: the tensors, and the objects that move themselves and hide theirs."""
    found: list[Any] = []

    def collect(leaf: Any) -> Any:
        if _is_movable(leaf):
            found.append(leaf)
        return leaf

    map_leaves(collect, batch, is_leaf=_is_movable, keep=True)
    return found


def has_streams(device: torch.device) -> bool:
    """Whether copies to `device` can run beside its computations. On MPS they share one queue."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type != "mps"


Carry: TypeAlias = Callable[[Iterator[Any], torch.device], Iterator[Any]]
"""Gives the batches on a device."""


def one_by_one(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on a device, each copied when the loop asks for it."""
    return (move(batch, device) for batch in batches)


def one_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on an accelerator, each copied while the loop works on the one before.

    Reads one batch more than it has yielded. What is yielded is safe to use on the current stream, and its memory is
    not given to others before the work queued on it is done.
    """
    # Note [Who frees a batch copied on another stream]
    # The allocator gives memory back to the stream that it was taken on, here the side stream, as soon as Python
    # drops the tensor. `record_stream` tells it that the loop's stream uses it too. Objects that move themselves
    # hide their tensors, so a batch that holds one is moved on the loop's own stream.
    side = torch.Stream(device)
    ahead: tuple[Any, torch.Event | None] | None = None
    for batch in batches:
        copied = None
        if all(isinstance(movable, Tensor) for movable in movables(batch)):
            with side:
                moved = move(batch, device)
                copied = side.record_event()
        else:
            moved = move(batch, device)
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = moved, copied
    if ahead is not None:
        yield _arrived(*ahead, device)


def _arrived(batch: Any, copied: torch.Event | None, device: torch.device) -> Any:
    if copied is not None:
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(copied)
        for tensor in movables(batch):
            tensor.record_stream(stream)
    return batch
