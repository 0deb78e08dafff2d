"""What each strategy supports here: its accelerators, its precisions, and the capabilities that it lacks.

Computed by `resolve` (which calls `Strategy.refuse`) and `Strategy.lacks`, so a script gets the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

from rich.console import Console

from fabric.cli.tables import NotedTable
from fabric.configure.machine import Machine
from fabric.configure.request import Request
from fabric.configure.resolve import resolve
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import CAPABILITIES, Capability
from fabric.strategies.name_registry import Registration
from fabric.strategies.precision.precision import Precision, PrecisionWord
from fabric.strategies.strategy import Strategy

_WORDS: tuple[PrecisionWord, ...] = get_args(PrecisionWord)


def describe_strategy(machine: Machine, registration: Registration) -> dict[str, Any]:
    """Describe one strategy in JSON types, as in a process that no launcher started.

    `needs_function`: whether it is refused because it needs a function of the user's. `precisions`: by accelerator.
    `lacks`: names in `capabilities.py`, each with the error message of the call.
    """
    why_not: str | None = None
    precisions: dict[str, list[str]] = {}
    lacks: Mapping[Capability, str] = {}
    needs_function = False
    for found in machine.usable():
        try:
            strategy = registration.make()
            lacks, needs_function = strategy.lacks, strategy.needs_function
            alone = replace(machine, world=None, packages=strategy.look_for_packages())
            resolve(Request(accelerator=found.accelerator, strategy=strategy), alone)
        except Exception as error:  # a third-party strategy; whatever its constructor raises is the reason shown
            why_not = str(error) or type(error).__name__
        else:
            precisions[found.accelerator.name] = _precisions(strategy, found.accelerator, alone)
    return {
        "name": registration.name,
        "description": registration.description,
        "source": registration.source,
        "runs_on": list(precisions),
        "why_not": None if precisions else why_not,
        "needs_function": needs_function,
        "precisions": precisions,
        "lacks": dict(lacks),
    }


def _precisions(strategy: Strategy, accelerator: Accelerator, machine: Machine) -> list[str]:
    words: list[str] = []
    for word in _WORDS:
        with suppress(ValueError):
            resolve(Request(accelerator=accelerator, strategy=strategy, precision=Precision.parse(word)), machine)
            words.append(word)
    return words


def not_here(row: Mapping[str, Any]) -> str:
    """What a cell says of something that cannot run."""
    return "needs your function" if row.get("needs_function") else "no"


def show_strategies(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each strategy: its precisions, the capabilities it lacks, and the number of each reason."""
    console, table = Console(), NotedTable("strategy", "precisions", "unsupported")
    for row in rows:
        here = [
            f"{name}: {'all' if len(words) == len(_WORDS) else ', '.join(words)}"
            for name, words in row["precisions"].items()
        ]
        precisions = "; ".join(here) or f"{not_here(row)} {table.note(row['why_not'])}"
        lacks = ", ".join(f"{word} {table.note(sentence)}" for word, sentence in row["lacks"].items())
        table.add(row["name"], [precisions, lacks], can_run=row["why_not"] is None)
    table.print(console)
    console.print("\nCapabilities:", highlight=False)
    for word, meaning in CAPABILITIES.items():
        console.print(f"  {word}: {meaning}", highlight=False, markup=False)
