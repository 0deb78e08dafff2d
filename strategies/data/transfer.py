"""Move batches to the device, nested containers included; on an accelerator while it computes on the previous batch.

Batches are copied on a side stream, from pinned memory, so that the host waits for no copy. A batch that the loader has
not pinned (`pin_memory=True`) is copied to pinned memory here, by the loop's thread.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from fabric.strategies.accelerators.torch_accelerator import has_streams
from fabric.strategies.tensors.nests import leaves_in, map_leaves


@runtime_checkable
class Movable(Protocol):
    """An object with a `to` method, such as tensors, packed sequences and tokenised batches."""

    def to(self, device: torch.device) -> Any:
        """The same object on `device`."""


def move(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """The batch with every tensor in it on `device`, in new containers of the same types; `batch` is not changed.

    Descends into the containers that `map_leaves` knows, and calls the `to` method of any other object that has one.
    Pinned tensors are copied asynchronously (`non_blocking`), on the current stream. `pin`: tensors on the CPU are
    copied to pinned memory first.
    """

    def move_one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            is_read = device.type != "cpu" and leaf.device.type == "cpu"
            leaf = leaf.pin_memory() if is_read and pin and leaf.layout is torch.strided else leaf
            return leaf.to(device, non_blocking=is_read and leaf.is_pinned())
        return leaf.to(device) if _is_movable(leaf) else leaf

    return map_leaves(move_one, batch, is_leaf=_is_movable)


def _is_movable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or (isinstance(leaf, Movable) and not isinstance(leaf, type))


def movables(batch: Any) -> list[Any]:
    """The leaves that `move` moves: tensors, and objects with a `to` method, whose tensors are not known."""
    return leaves_in(batch, _is_movable)


Carry: TypeAlias = Callable[[Iterator[Any], torch.device], Iterator[Any]]
"""Takes batches and a device; yields the batches on that device."""


def one_by_one(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on a device, each copied when the loop asks for it: while the device computes on the one
    before, unless the loop waits for that."""
    if not has_streams(device):
        return (move(batch, device) for batch in batches)
    side = torch.Stream(device)
    return (_arrived(*_copied(batch, side), device) for batch in batches)


def one_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on a device, on an accelerator each copied before the loop asks for it.

    Reads one batch more than it has yielded. The current stream waits for the copy of a yielded batch, and its memory
    is reused only after the work that the current stream has queued on it.
    """
    if not has_streams(device):
        yield from one_by_one(batches, device)
        return
    side = torch.Stream(device)
    ahead: tuple[Any, torch.Event | None] | None = None
    for batch in batches:
        copied = _copied(batch, side)
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = copied
    if ahead is not None:
        yield _arrived(*ahead, device)


def _copied(batch: Any, side: torch.Stream) -> tuple[Any, torch.Event | None]:
    """The batch on the device of a stream, and the event of its copy.

    # Note [Who frees a batch copied on another stream]
    The caching allocator returns memory to the stream that it was allocated on, here the side stream, as soon as Python
    drops the tensor. `record_stream` tells it that the loop's stream uses it too. The tensors within other objects with
    a `to` method are not known, so a batch with one is moved on the loop's own stream.
    """
    if not all(isinstance(movable, Tensor) for movable in movables(batch)):
        return move(batch, side.device), None
    with side:
        return move(batch, side.device, pin=True), side.record_event()


def _arrived(batch: Any, copied: torch.Event | None, device: torch.device) -> Any:
    if copied is not None:
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(copied)
        for tensor in movables(batch):
            tensor.record_stream(stream)
    return batch
