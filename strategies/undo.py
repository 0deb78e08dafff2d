"""Functions that undo something: several combined into one, and for attributes of an instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def undo_all(actions: Iterable[Callable[[], object]]) -> Callable[[], None]:
    """A function that calls all actions, in order."""
    actions = tuple(actions)

    def undo() -> None:
        for action in actions:
            action()

    return undo


def replace_attributes(obj: object, **values: object) -> Callable[[], None]:
    """Set attributes of the instance, past `__setattr__` of its class. Returns a function that undoes it."""
    before = {name: vars(obj)[name] for name in values if name in vars(obj)}
    vars(obj).update(values)

    def undo() -> None:
        for name in values:
            vars(obj).pop(name, None)
        vars(obj).update(before)

    return undo
