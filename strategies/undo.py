"""Combine several undo functions into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def undo_all(actions: Iterable[Callable[[], object]]) -> Callable[[], None]:
    """A function that calls all actions, in order."""
    actions = tuple(actions)

    def undo() -> None:
        for action in actions:
            action()

    return undo
