"""Batches to the device, whatever they are nested in; on an accelerator one batch ahead of the loop.

The copy of the next batch runs on a stream of its own while the device computes on the last. It overlaps where the
loader pins its memory; without, the host waits for each copy, as in a plain loop.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Movable(Protocol):
    """Anything that knows how to go to a device, as tensors, packed sequences and tokenised batches do."""

    def to(self, device: torch.device) -> Any:
        """The same on `device`."""


@runtime_checkable
class NamedFields(Protocol):
    """A named tuple, which is made from its fields and not from one iterable."""

    _fields: tuple[str, ...]


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`, in containers of the same types; the batch itself is left.

    Goes through mappings, lists, tuples, named tuples and dataclasses, and leaves to anything with a `to` method how
    it moves. A pinned tensor is copied without waiting; work queued on the current stream afterwards sees it.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type != "cpu" and batch.device.type == "cpu" and batch.is_pinned())
    if isinstance(batch, Movable):
        return batch.to(device)
    if isinstance(batch, tuple):
        moved = [move(item, device) for item in batch]
        return type(batch)(*moved) if isinstance(batch, NamedFields) else type(batch)(moved)
    if isinstance(batch, list):
        duplicate = copy.copy(batch)
        duplicate[:] = [move(item, device) for item in batch]
        return duplicate
    if isinstance(batch, Mapping):
        items = {key: move(value, device) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return type(batch)(items)  # type: ignore[call-arg]
        fresh = copy.copy(batch)
        fresh.update(items)
        return fresh
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        replica = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(replica, field.name, move(getattr(batch, field.name), device))
        return replica
    return batch


def movables(batch: Any) -> Iterator[Any]:
    """What `move` moves: the tensors, and the objects that move themselves and hide theirs."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from movables(item)
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from movables(item)
    elif isinstance(batch, Movable):
        yield batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from movables(getattr(batch, field.name))


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
