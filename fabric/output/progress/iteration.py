"""Iterate with a progress display: a bar on a terminal, a line every few seconds in a file or a notebook.

The bar is drawn between two items: there is no thread, because a loader that forks its workers could copy a lock that
the thread holds. So the bar stands still while one item takes long. Costs about a microsecond per item.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch import Tensor

from fabric.output.progress.rate import ProgressRate

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Size: TypeAlias = int | Callable[[Any], int]


def progress(
    iterable: Iterable[T],
    description: str = "",
    *,
    total: int | None = None,
    size: Size | None = None,
    num_ranks: int = 1,
    enabled: bool = True,
    console: Console | None = None,
) -> Iterator[T]:
    """Iterate over `iterable`, and show the position, samples per second, and the time elapsed and left.

    `total`: number of items, if `len(iterable)` is not known.
    `size`: samples per item, or a function of the item; by default the first dim of its first tensor.
    `num_ranks`: number of ranks that read items of that size at the same time.
    `enabled=False`: returns the bare iterator, for ranks other than zero.
    `console`: where to show it; by default rich's own, on standard output.
    After a `break` or an exception the bar stays as it was, and the terminal is restored.
    Raises: ValueError: `total` or `size` is negative.
    """
    for name, value in (("total", total), ("size", size)):
        if isinstance(value, int) and value < 0:
            raise ValueError(f"`progress({name}={value})` is negative. Write a number from 0 on, or leave it out.")
    if not enabled:
        return iter(iterable)
    known = length_hint(iterable, -1) if total is None else total
    rate = ProgressRate(total=None if known < 0 else known, num_ranks=num_ranks)
    return _shown(iterable, description, rate, size, console)


def _shown(
    iterable: Iterable[T], description: str, rate: ProgressRate, size: Size | None, console: Console | None
) -> Iterator[T]:
    from rich import get_console

    from fabric.output.progress.views import view_for

    size_of = _size_of(size)
    view = view_for(description, rate, console or get_console())
    atexit.register(view.close, rate)  # for an iterator that is still held when the program ends
    try:
        now = perf_counter()
        rate.look(now)
        due = now + view.every_seconds
        for item in iterable:
            yield item
            rate.items += 1
            rate.samples += size_of(item)
            now = perf_counter()
            if now >= due:
                rate.look(now)
                view.draw(rate)
                due = now + view.every_seconds
    finally:
        rate.look(perf_counter())
        view.close(rate)
        atexit.unregister(view.close)


def _size_of(size: Size | None) -> Callable[[Any], int]:
    if size is None:
        return _first_dim
    return size if callable(size) else lambda item: size


def _first_dim(item: Any) -> int:
    """The first dim of the first tensor in nested dicts, lists and tuples; 0 if there is none."""
    if isinstance(item, Tensor):
        return item.shape[0] if item.ndim else 0
    if isinstance(item, Mapping):
        item = item.values()
    elif not isinstance(item, list | tuple):
        return 0
    for part in item:
        if found := _first_dim(part):
            return found
    return 0
