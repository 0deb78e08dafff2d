"""Lengths of iterables; iterators that are iterated once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_END = object()


def once(iterator: Iterator[Any]) -> Iterator[Any]:
    """The same items, by `next` alone.

    `islice`, `zip` and `for` call `iter` on it, with which the iterators of some streams (litdata's) begin again. For
    generators, and iterators of lists and ranges, it does nothing.
    """
    return iterator if type(iterator).__module__ == "builtins" else _by_next(iterator)


def _by_next(iterator: Iterator[Any]) -> Iterator[Any]:
    while (item := next(iterator, _END)) is not _END:
        yield item


def length_of(something: object) -> int | None:
    """`len(something)`, None if it has no length."""
    try:
        return len(something)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
