"""Lengths of iterables; reading items from an iterator by `next` alone.

`islice`, `zip` and `for` call `iter` on it, with which the iterators of some streams (litdata's) begin again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def take(iterator: Iterator[T], count: int | None) -> list[T]:
    """The next `count` items (None: all), or fewer if the iterator ends."""
    if type(iterator).__module__ == "builtins":  # generators, and iterators of lists and ranges: `iter` does nothing
        return list(islice(iterator, count))
    taken = list[T]()
    while count is None or len(taken) < count:
        try:
            taken.append(next(iterator))
        except StopIteration:
            break
    return taken


def length_of(something: object) -> int | None:
    """`len(something)`, None if it has no length."""
    try:
        return len(something)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
