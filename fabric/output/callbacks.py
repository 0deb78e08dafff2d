"""Run one method on every callback that has it. A callback is any object; its hooks are the names of its methods."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any


def call(callbacks: Sequence[object], hook: str, /, *args: Any, **kwargs: Any) -> None:
    """Run `callback.<hook>(*args, **kwargs)` on each callback that has it, in order. Return values are ignored.

    If a callback raises, those after it are not called.
    """
    for method in methods(callbacks, hook):
        method(*args, **kwargs)


def methods(callbacks: Sequence[object], hook: str) -> Iterator[Callable[..., Any]]:
    """The method of each callback that has it, in order. Raises: TypeError: the attribute is not a method."""
    for callback in callbacks:
        method = getattr(callback, hook, None)
        if method is not None and not callable(method):
            found = f"`{type(callback).__name__}.{hook}` is a `{type(method).__name__}`, which cannot be called."
            raise TypeError(f"{found} A hook is a method: `def {hook}(self, ...)`.")
        if method is not None:
            yield method
