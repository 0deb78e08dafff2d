"""Run one method on every callback that has it. A callback is any object; its hooks are the names of its methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def call(callbacks: Sequence[object], hook: str, /, *args: Any, **kwargs: Any) -> None:
    """Run `callback.<hook>(*args, **kwargs)` on each callback that has it, in order. Return values are ignored.

    If a callback raises, those after it are not called.
    Raises: TypeError: before any is called, if a callback has something of that name that cannot be called.
    """
    methods = [_method(callback, hook) for callback in callbacks]
    for method in methods:
        if method is not None:
            method(*args, **kwargs)


def _method(callback: object, hook: str) -> Callable[..., object] | None:
    method = getattr(callback, hook, None)
    if method is None or callable(method):
        return method
    raise TypeError(
        f"`call({hook!r})`: `{type(callback).__name__}.{hook}` is {method!r}, a `{type(method).__name__}`, which "
        "cannot be called. Make it a method, or give the attribute another name."
    )
