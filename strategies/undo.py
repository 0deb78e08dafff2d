"""Undoing several things by one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def undo_all(actions: Iterable[Callable[[], object]]) -> Callable[[], None]:
    """A function that calls each of the actions, in their order."""
    actions = tuple(actions)

    def undo() -> None:
        for action in actions:
            action()

    return undo
