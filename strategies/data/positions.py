"""What a loader with a position of its own has, and which batches a position may contain."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

MOST_BYTES = 16 * 2**20
"""Of a batch in a position: positions are sent to all ranks when they are saved."""


@runtime_checkable
class Resumable(Protocol):
    """A loader that can save and restore its position, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def can_be_saved(batch: Any) -> bool:
    """Whether a checkpoint may contain the batch: plain tensors and values in plain containers, not too large."""
    return batch is not None and _num_bytes(batch) <= MOST_BYTES


def _num_bytes(value: Any) -> float:
    """Of tensors, strings and numbers; infinite if there is something else."""
    if type(value) is Tensor:
        return value.nbytes
    if type(value) in (str, bytes):
        return len(value)
    if type(value) in (list, tuple):
        return sum(map(_num_bytes, value))
    if type(value) is dict:
        return sum(map(_num_bytes, [*value, *value.values()]))
    return 8 if value is None or type(value) in (bool, int, float) else math.inf
