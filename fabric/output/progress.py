"""Iterate with a progress display: a bar of rich on a terminal, a line every few seconds in a file or a notebook.

The bar is drawn between two items: there is no thread, because a loader that forks its workers could copy a lock that
the thread holds. So the bar stands still while one item takes long. Costs about a microsecond per item.
"""

import atexit
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from operator import length_hint
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, final

from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task

T = TypeVar("T")

_WINDOW_SECONDS = 30.0
"""The window over which a rate is computed, so that a slow start (compilation, workers) is forgotten. Not measured."""


def progress(
    iterable: Iterable[T],
    description: str = "",
    *,
    total: int | None = None,
    num_ranks: int = 1,
    enabled: bool = True,
    console: "Console | None" = None,
) -> Iterator[T]:
    """Iterate over `iterable`, and show the position, samples per second, and the time elapsed and left.

    The samples of an item are the first dim of its first tensor. `total`: number of items, if `len(iterable)` is not
    known. `num_ranks`: number of ranks that read items of that size at the same time. `enabled=False`: returns the bare
    iterator, for ranks other than zero. `console`: where to show it; by default rich's own, on standard output.
    After a `break` or an exception the bar stays as it was, and the terminal is restored.
    """
    if not enabled:
        return iter(iterable)
    known = length_hint(iterable, -1) if total is None else total
    return _shown(iterable, description, None if known < 0 else known, num_ranks, console)


def _shown(
    iterable: Iterable[T], description: str, total: int | None, num_ranks: int, console: "Console | None"
) -> Iterator[T]:
    display = _Display(description, total, num_ranks, console)
    atexit.register(display.close)  # for an iterator that is still held when the program ends
    due = perf_counter() + display.every_seconds
    try:
        for item in iterable:
            yield item
            display.items += 1
            display.samples += first_dim(item)
            if perf_counter() >= due:
                display.draw()
                due = perf_counter() + display.every_seconds
    finally:
        display.close()
        atexit.unregister(display.close)


@final
class _Display:
    """A bar if the console is a terminal that can move its cursor; lines in files, pipes and notebooks."""

    def __init__(self, description: str, total: int | None, num_ranks: int, console: "Console | None") -> None:
        from rich import get_console
        from rich.progress import BarColumn, Progress, TextColumn

        self.items = self.samples = 0
        self._num_ranks, self._items_drawn = num_ranks, -1
        self._console = console or get_console()
        is_bar = self._console.file.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
        self.every_seconds = 0.1 if is_bar else 5.0
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[line]}", markup=False),
            console=self._console,
            auto_refresh=False,
            speed_estimate_period=_WINDOW_SECONDS,
            disable=not is_bar,
        )
        self._task = self._bars.add_task(description, total=total, line="")
        self._bars.start()

    def draw(self) -> None:
        """Show the position."""
        self._items_drawn = self.items
        self._bars.update(self._task, completed=self.items)
        task = self._bars.tasks[0]
        line = _line(task, self.samples, self._num_ranks)
        self._bars.update(self._task, line=line, refresh=True)
        if self._bars.disable:
            lead = f"{task.description}: " if task.description else ""
            print(f"{lead}{line}", file=self._console.file, flush=True)

    def close(self) -> None:
        """Show the last position, and restore the terminal. A second call does nothing."""
        if self._items_drawn != self.items:
            self.draw()
        self._bars.stop()


def _line(task: "Task", samples: int, num_ranks: int) -> str:
    """`120/450  3,210 samples/s  0:00:12  0:00:33 left`; items per second if the batch size is not known."""
    seconds = task.elapsed or 0.0
    rate, unit = task.speed or (task.completed / seconds if seconds else 0.0), "it/s"
    if samples:
        rate, unit = rate * num_ranks * samples / task.completed, "samples/s"
    parts = [
        f"{task.completed}/{task.total}" if task.total is not None else f"{task.completed}",
        f"{rate:,.0f} {unit}" if rate >= 10 else f"{rate:.2f} {unit}",
        str(timedelta(seconds=round(seconds))),
    ]
    if task.time_remaining:
        parts.append(f"{timedelta(seconds=round(task.time_remaining))} left")
    return "  ".join(parts)


def first_dim(item: Any) -> int:
    """The first dim of the first tensor in nested dicts, lists and tuples; 0 if there is none. One call."""
    rest = [item]
    while rest:
        part = rest.pop()
        if isinstance(part, Tensor):
            if part.ndim and part.shape[0]:
                return part.shape[0]
        elif isinstance(part, Mapping):
            rest.extend(reversed(list(part.values())))
        elif isinstance(part, list | tuple):
            rest.extend(reversed(part))
    return 0
