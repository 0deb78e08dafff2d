"""A bar while a checkpoint is saved or loaded: on a terminal, and only where that takes longer than a second.

Drawn between two blocks of bytes, as `progress` draws between two items: there is no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_SECONDS = 0.1


@contextmanager
def checkpoint_progress(
    description: str, *, enabled: bool, after_seconds: float = 1.0, console: Console | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Gives a function of the bytes that are done and of those to do. Afterwards the terminal is as it was before."""
    if not enabled:
        yield lambda done_bytes, total_bytes: None
        return
    from rich import get_console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = console or get_console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    task = bars.add_task(description)
    due = perf_counter() + after_seconds

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal due
        if perf_counter() >= due:
            due = perf_counter() + _EVERY_SECONDS
            bars.start()
            bars.update(task, completed=done_bytes, total=total_bytes, refresh=True)

    try:
        yield show
    finally:
        bars.stop()
