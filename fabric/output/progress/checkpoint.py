"""A bar while a checkpoint is saved or loaded: on a terminal, and only where that takes longer than a second.

Drawn between two blocks of bytes, as `progress` draws between two items: there is no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_SECONDS = 0.1


@contextmanager
def checkpoint_progress(
    description: str, *, enabled: bool, after_seconds: float = 1.0, console: Console | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Gives a function of the bytes that are done and of those to do. Afterwards the terminal is as it was before."""
    bar = _Bar(description, after_seconds, console)
    try:
        yield bar.show if enabled else lambda done_bytes, total_bytes: None
    finally:
        bar.close()


@final
class _Bar:
    def __init__(self, description: str, after_seconds: float, console: Console | None) -> None:
        self._description, self._console = description, console
        self._due = perf_counter() + after_seconds
        self._bars: Any = None
        self._task: Any = None

    def show(self, done_bytes: int, total_bytes: int) -> None:
        if perf_counter() < self._due:
            return
        self._due = perf_counter() + _EVERY_SECONDS
        if self._bars is None and not self._start(total_bytes):
            self._due = float("inf")
            return
        self._bars.update(self._task, completed=done_bytes, refresh=True)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _start(self, total_bytes: int) -> bool:
        from rich import get_console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        console = self._console or get_console()
        if not console.is_terminal:
            return False
        words = TextColumn("{task.description}", markup=False)
        columns = (words, BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bars.add_task(self._description, total=total_bytes)
        self._bars.start()
        return True
