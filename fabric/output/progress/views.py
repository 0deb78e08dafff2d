"""The two displays of a progress: a bar that is redrawn, or one line after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fabric.output.progress.rate import ProgressRate


class View(ABC):
    """Displays one iteration. `close` may be called twice."""

    every_seconds: float
    """Seconds between two draws."""

    @abstractmethod
    def draw(self, rate: ProgressRate) -> None:
        """Show the rate as of its last `look`."""

    @abstractmethod
    def close(self, rate: ProgressRate) -> None:
        """Show the rate for the last time, and restore the output."""


@final
class Bar(View):
    """A bar at the bottom of a terminal. Printed text appears above it; bars can be nested."""

    every_seconds = 0.1

    def __init__(self, description: str, rate: ProgressRate, console: Console) -> None:
        words = (TextColumn("{task.description}", markup=False), TextColumn("{task.fields[line]}", markup=False))
        self._bars = Progress(words[0], BarColumn(), words[1], console=console, auto_refresh=False)
        self._task = self._bars.add_task(description, total=rate.total, line="")
        self._bars.start()

    def draw(self, rate: ProgressRate) -> None:
        self._bars.update(self._task, completed=rate.items, line=rate.line(), refresh=True)

    def close(self, rate: ProgressRate) -> None:
        self._bars.update(self._task, completed=rate.items, line=rate.line())
        self._bars.stop()


@final
class Lines(View):
    """A line every few seconds and one at the end, without control codes."""

    every_seconds = 5.0

    def __init__(self, description: str, console: Console) -> None:
        self._lead, self._console = f"{description}: " if description else "", console
        self._items_shown = -1

    def draw(self, rate: ProgressRate) -> None:
        self._items_shown = rate.items
        print(f"{self._lead}{rate.line()}", file=self._console.file, flush=True)

    def close(self, rate: ProgressRate) -> None:
        if self._items_shown != rate.items:
            self.draw(rate)


def view_for(description: str, rate: ProgressRate, console: Console) -> View:
    """A bar if the console is a terminal that can move its cursor; lines in files, pipes and notebooks."""
    if console.file.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return Bar(description, rate, console)
    return Lines(description, console)
