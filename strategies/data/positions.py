"""Loaders with a position of their own, such as torchdata's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

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
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterDataPipe):
        return loader
    saves = isinstance(loader.dataset, IterableDataset) and isinstance(loader.dataset, Resumable)
    return loader if saves and not huggingface.loses_samples(loader.dataset) else None


@runtime_checkable
class Restarting(Protocol):
    """A `Loader` of `torchdata.nodes`: restored at the end of an epoch, it begins the next one at once if this is set.

    And from then on it returns the restored state, wherever it is (torchdata 0.11).
    """

    restart_on_stop_iteration: bool


@contextmanager
def ending_where_saved(loader: object) -> Iterator[None]:
    """Context: the loader is iterated, and is not restarted if it is at the end of its epoch."""
    if not isinstance(loader, Restarting):
        yield
        return
    restarts, loader.restart_on_stop_iteration = loader.restart_on_stop_iteration, False
    try:
        yield
    finally:
        loader.restart_on_stop_iteration = restarts
