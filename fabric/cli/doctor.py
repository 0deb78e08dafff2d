"""`fabric doctor`: what this machine can run, and the reason for what it cannot, as tables or as JSON."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fabric.configure.abilities import PRECISIONS, report, with_every_accelerator
from fabric.configure.machine import Machine
from fabric.configure.request import Request
from fabric.strategies.capabilities import CAPABILITIES
from fabric.strategies.strategy_registry import strategy_registrations


def doctor(parsed: argparse.Namespace) -> int:
    """Print the report, or only its part on strategies; returns the exit code 0."""
    machine = with_every_accelerator(Machine.look(os.environ, Request()))
    found = report(machine, strategy_registrations())
    if parsed.json:
        print(json.dumps({"strategies": found["strategies"]} if parsed.strategies else found, indent=2))
    elif parsed.strategies:
        _show_strategies(found["strategies"])
    else:
        _show(found)
    return 0


def _show(found: Mapping[str, Any]) -> None:
    console = Console()
    versions = f"[bold]Python[/] {found['python']}, [bold]torch[/] {found['torch']}"
    console.print(f"{versions}, {found['system']}, {found['cores']} cores", highlight=False)
    for name in found["other_owners"]:
        console.print(
            f"The distribution `{name}` owns the import package `fabric`, too: its files and those of torchfabric "
            f"replace each other. Run `pip uninstall {name}`, and install torchfabric again.",
            highlight=False,
        )
    world = found["started_by"]
    console.print(
        "No launcher's variables in the environment: a script run from here starts its own processes."
        if world is None
        else f"Rank {world['rank']} of {world['size']}, started by {world['launcher']}: {' '.join(found['variables'])}",
        highlight=False,
    )
    _print_table(console, found["accelerators"], "accelerator", "here")
    _print_table(console, found["launchers"], "launcher", "here", "what it does")
    _print_table(console, found["strategies"], "strategy", "here", "what it is")


def _print_table(console: Console, rows: Sequence[Mapping[str, Any]], *columns: str) -> None:
    """Print a row for each of `rows`: how many devices it has or where it runs, and its description."""
    table = _NotedTable(*columns)
    for row in rows:
        here = ", ".join(row.get("runs_on", ())) or str(row.get("devices", "yes"))
        description = [row["description"]] if "description" in row else []
        table.add(row, here if row["why_not"] is None else _not_here(row, table), *description)
    table.print(console)


def _not_here(row: Mapping[str, Any], table: "_NotedTable") -> str:
    """The cell of something that cannot run, with the number of the reason."""
    return f"{'needs your function' if row.get('needs_function') else 'no'} {table.note(row['why_not'])}"


def _show_strategies(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each strategy: its precisions, the capabilities it lacks, and the number of each reason."""
    console, table = Console(), _NotedTable("strategy", "precisions", "unsupported")
    for row in rows:
        here = [
            f"{name}: {'all' if len(words) == len(PRECISIONS) else ', '.join(words)}"
            for name, words in row["precisions"].items()
        ]
        precisions = "; ".join(here) or _not_here(row, table)
        lacks = ", ".join(f"{word} {table.note(sentence)}" for word, sentence in row["lacks"].items())
        table.add(row, precisions, lacks)
    table.print(console)
    console.print("\nCapabilities:", highlight=False)
    for word, meaning in CAPABILITIES.items():
        console.print(f"  {word}: {meaning}", highlight=False, markup=False)


@final
class _NotedTable:
    """A table, and below it the sentences that its cells refer to, each once."""

    def __init__(self, *columns: str) -> None:
        name, *others = columns
        self._table = Table(Column(name, no_wrap=True), *(Column(column, overflow="fold") for column in others))
        self._notes: dict[str, int] = {}

    def note(self, sentence: str) -> str:
        """The number by which a cell refers to this sentence: `(1)`."""
        return f"({self._notes.setdefault(sentence, len(self._notes) + 1)})"

    def add(self, row: Mapping[str, Any], *cells: str) -> None:
        """Add a row, its name bright if it can run."""
        style = "bold green" if row["why_not"] is None else "dim"
        self._table.add_row(Text(row["name"], style=style), *map(Text, cells))

    def print(self, console: Console) -> None:
        """Print the table and its sentences."""
        console.print(self._table)
        for sentence, number in self._notes.items():
            # In a pipe, for programs, each sentence is one line.
            console.print(f"({number}) {sentence}", highlight=False, markup=False, soft_wrap=not console.is_terminal)
