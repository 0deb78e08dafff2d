"""`fabric doctor`: what this machine can run, and the reason for what it cannot.

It calls the same functions as `Fabric(...)`, so both give the same answers. The report is plain data, shown as tables
or as JSON. It imports torch, and initialises no device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import packages_distributions
from typing import Any

import torch
from rich.console import Console

from fabric.cli.strategies import describe_strategy, not_here, show_strategies
from fabric.cli.tables import NotedTable
from fabric.configure.machine import Found, Machine
from fabric.configure.request import Request
from fabric.launchers.process.os_process import num_cores
from fabric.launchers.registry import LAUNCHERS
from fabric.strategies.accelerators.registry import accelerators
from fabric.strategies.name_registry import Registration
from fabric.strategies.registry import strategy_registrations


def doctor(parsed: argparse.Namespace) -> int:
    """Print the report, or only its part on strategies; returns the exit code 0."""
    machine = Machine.look(os.environ, Request())
    everything = replace(machine, found=tuple(Found.look(accelerator) for accelerator in accelerators()))
    found = report(everything, strategy_registrations())
    if parsed.json:
        print(json.dumps({"strategies": found["strategies"]} if parsed.strategies else found, indent=2))
    elif parsed.strategies:
        show_strategies(found["strategies"])
    else:
        _show(found)
    return 0


def report(machine: Machine, strategies: Mapping[str, Registration]) -> dict[str, Any]:
    """What the machine can run, as JSON types. `why_not` is null if it can."""
    world = machine.world
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{machine.system} {platform.release()}",
        "cores": num_cores(),
        "started_by": None if world is None else {"launcher": world.launcher, "rank": world.rank, "size": world.size},
        "variables": list(machine.variables),
        "other_owners": sorted({*packages_distributions().get("fabric", ())} - {"torchfabric"}),
        "accelerators": [
            {"name": found.accelerator.name, "devices": found.num_devices, "why_not": found.why_unavailable}
            for found in machine.found
        ],
        "launchers": [
            {"name": row.name, "description": row.description, "why_not": row.why_not(machine.program)}
            for row in LAUNCHERS.values()
            if row.is_written
        ],
        "strategies": [describe_strategy(machine, registration) for registration in strategies.values()],
    }


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
    _print_table(console, ("accelerator", "here"), found["accelerators"], lambda row: (str(row["devices"]),))
    _print_table(
        console, ("launcher", "here", "what it does"), found["launchers"], lambda row: ("yes", row["description"])
    )
    _print_table(
        console,
        ("strategy", "here", "what it is"),
        found["strategies"],
        lambda row: (", ".join(row["runs_on"]), row["description"]),
    )


def _print_table(
    console: Console,
    columns: tuple[str, ...],
    rows: Sequence[Mapping[str, Any]],
    cells_of: Callable[[Mapping[str, Any]], tuple[str, ...]],
) -> None:
    """Print a row for each of `rows`; `cells_of`: where it can run, and the other cells."""
    table = NotedTable(*columns)
    for row in rows:
        here, *others = cells_of(row)
        why_not = row["why_not"]
        table.add(
            row["name"],
            [here if why_not is None else f"{not_here(row)} {table.note(why_not)}", *others],
            can_run=why_not is None,
        )
    table.print(console)
