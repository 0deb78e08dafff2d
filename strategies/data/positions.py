"""What a loader with a position of its own has, and which batches a position may contain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

MOST_VALUE_BYTES = 64 * 2**10
"""Of the strings and numbers of a batch in a position. They are sent to all ranks when they are saved; tensors are not:
each rank writes its own."""


@runtime_checkable
class Resumable(Protocol):
    """A loader that can save and restore its position, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def saves_each_position(loader: Resumable) -> bool:
    """Whether `state_dict` costs little after each batch, and does not change later: torchdata's `StatefulDataLoader`,
    whose workers send the state of the data with each batch. Others may return an object that they go on to change."""
    module = getattr(getattr(type(loader), "state_dict", None), "__module__", None) or ""
    return (
        module.startswith("torchdata.stateful_dataloader.")
        and isinstance(loader, DataLoader)
        and loader.num_workers > 0
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The end of one rank's data, of which it repeats the last batch while other ranks go on."""

    ended: bool = False
    """Whether the rank has no batch left."""
    last: Any = None
    """The batch that the rank repeats once it has no other; None if it is not known, or no batch is repeated."""


def unsaved_part(batch: Any) -> str | None:
    """Why a checkpoint cannot contain the batch; None if it can: dense tensors and values in plain containers."""
    num_bytes = 0

    def find(value: Any) -> str | None:
        nonlocal num_bytes
        if type(value) is Tensor:
            return None if value.layout is torch.strided and not value.is_quantized else f"a tensor of {value.layout}"
        if type(value) in (list, tuple, dict):
            parts = [*value, *value.values()] if type(value) is dict else value
            return next((found for part in parts if (found := find(part)) is not None), None)
        if type(value) not in (str, bytes, bool, int, float, type(None)):
            return f"a `{type(value).__name__}`"
        num_bytes += len(value) if isinstance(value, (str, bytes)) else 8
        return None

    found = find(batch)
    if found is None and num_bytes > MOST_VALUE_BYTES:
        return f"{num_bytes:,} bytes of strings and numbers, and at most {MOST_VALUE_BYTES:,} are saved"
    return found
