"""Loaders with a position of their own, such as torchdata's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from fabric.strategies.data import huggingface


@runtime_checkable
class Resumable(Protocol):
    """A loader that can save and restore its position, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def own_position(loader: Iterable[Any]) -> Resumable | None:
    """The loader, if it saves its own position; None if its batches are counted instead.

    So are those of torchdata's `StatefulDataLoader` over map-style data, whose order is known, and over a stream
    without a state. It reads the stream again by itself, but then counts the batches before the position twice, so that
    a second resume in the same epoch loses samples (torchdata 0.11).
    """
    if not isinstance(loader, Resumable):
        return None
    if not isinstance(loader, DataLoader):
        return loader
    saves = isinstance(loader.dataset, IterableDataset) and isinstance(loader.dataset, Resumable)
    return loader if saves and not huggingface.loses_samples(loader.dataset) else None


T = TypeVar("T")
_END = object()


def once(iterator: Iterator[T]) -> Iterator[T]:
    """The same items, by `next` alone.

    `islice`, `zip` and `for` call `iter` on it, with which the iterators of some streams (litdata's) begin again. For
    generators, and iterators of lists and ranges, it does nothing.
    """
    return iterator if type(iterator).__module__ == "builtins" else _by_next(iterator)


def _by_next(iterator: Iterator[T]) -> Iterator[T]:
    while (item := next(iterator, _END)) is not _END:
        yield item  # type: ignore[misc]


def length_of(something: object) -> int | None:
    """`len(something)`, None if it has no length."""
    try:
        return len(something)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
