"""Positions of a stateful loader of which batches are read ahead: that of the loop is the one after its latest batch.

The loader's state is taken after each batch that is read. That is for torchdata's `StatefulDataLoader` with workers:
they send their states with the batches, and it takes 5 us. Without workers it takes 60 us, and reading ahead would draw
from the random generators of the loop at another time.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, final, runtime_checkable


@runtime_checkable
class Resumable(Protocol):
    """A loader that can save and restore its position, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@final
class Positions:
    """The positions of one iteration."""

    def __init__(self, loader: Resumable) -> None:
        """Called when the iteration has begun."""
        self._loader = loader
        self._following: deque[dict[str, Any]] = deque()
        self.current = loader.state_dict()
        """The loader's state as the loop has received its latest batch."""

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and take the state after each, and at the end."""
        for batch in batches:
            self._following.append(self._loader.state_dict())
            yield batch
        self._following.append(self._loader.state_dict())

    def receive(self) -> None:
        """Called when the loop receives a batch. A batch after the last is a repeated one, at the end."""
        if self._following:
            self.current = self._following.popleft()


def sends_states(loader: object) -> bool:
    """Whether this is torchdata's loader with workers."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader) and loader.num_workers > 0
