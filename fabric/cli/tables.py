"""Tables whose cells refer to numbered sentences below them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text


@final
class NotedTable:
    """A table, and below it the sentences that its cells refer to, each once."""

    def __init__(self, *columns: str) -> None:
        name, *others = columns
        self._table = Table(Column(name, no_wrap=True), *(Column(column, overflow="fold") for column in others))
        self._notes: dict[str, int] = {}

    def note(self, sentence: str) -> str:
        """The number by which a cell refers to this sentence: `(1)`."""
        return f"({self._notes.setdefault(sentence, len(self._notes) + 1)})"

    def add(self, name: str, cells: Sequence[str], *, can_run: bool) -> None:
        """Add a row."""
        style = "bold green" if can_run else "dim"
        self._table.add_row(Text(name, style=style), *map(Text, cells))

    def print(self, console: Console) -> None:
        """Print the table and its sentences."""
        console.print(self._table)
        for sentence, number in self._notes.items():
            # Not wrapped, so that commands can be copied.
            console.print(f"({number}) {sentence}", highlight=False, markup=False, soft_wrap=True)
