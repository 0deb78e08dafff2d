"""What a loader with a position of its own has."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Resumable(Protocol):
    """A loader that can save and restore its position, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
