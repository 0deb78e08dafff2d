"""`fabric doctor`: what this machine can run, and the reason for what it cannot.

It calls the same functions as `Fabric(...)`, so both give the same answers. The report is plain data, shown as tables
or as JSON. It imports torch, and initialises no device.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fabric.cli.clusters import clusters
from fabric.cli.strategies import describe_strategy, show_strategies
from fabric.configure.machine import Found, Machine
from fabric.configure.request import Request
from fabric.launchers.registry import LAUNCHERS
from fabric.strategies.accelerators.registry import accelerators
from fabric.strategies.registry import Registration, strategy_registrations


def doctor(*, as_json: bool, only_strategies: bool = False) -> int:
    """Print the report, or only its part on strategies; returns the exit code 0."""
    machine = Machine.look(os.environ, Request())
    everything = replace(machine, found=tuple(Found.look(accelerator) for accelerator in accelerators()))
    found = report(everything, strategy_registrations())
    if as_json:
        print(json.dumps({"strategies": found["strategies"]} if only_strategies else found, indent=2))
    elif only_strategies:
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
        "cores": machine.num_cores,
        "memory_bytes": _memory_bytes(),
        "started_by": None if world is None else {"launcher": world.launcher, "rank": world.rank, "size": world.size},
        "variables": list(machine.variables),
        "accelerators": [
            {"name": found.accelerator.name, "devices": found.num_devices, "why_not": found.why_unavailable}
            for found in machine.found
        ],
        "launchers": [
            {"name": row.name, "description": row.description, "why_not": row.why_not(machine.program)}
            for row in LAUNCHERS.values()
            if row.is_written
        ],
        "clusters": clusters(os.environ),
        "strategies": [describe_strategy(machine, registration) for registration in strategies.values()],
    }


def _memory_bytes() -> int | None:
    """Bytes of main memory; None if the system does not report it."""
    sysconf: Callable[[str], int] | None = getattr(os, "sysconf", None)  # Windows has none
    return None if sysconf is None else sysconf("SC_PHYS_PAGES") * sysconf("SC_PAGE_SIZE")


def _show(found: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    memory = "" if found["memory_bytes"] is None else f", {found['memory_bytes'] / 2**30:.1f} GiB of memory"
    console.print(
        f"[bold]Python[/] {found['python']}, [bold]torch[/] {found['torch']}, {found['system']}, {found['cores']} cores"
        f"{memory}",
        highlight=False,
    )
    world = found["started_by"]
    console.print(
        "No launcher's variables in the environment: a script run from here starts its own processes."
        if world is None
        else f"Rank {world['rank']} of {world['size']}, started by {world['launcher']}: {' '.join(found['variables'])}",
        highlight=False,
    )
    _table(
        console,
        ("accelerator", "here"),
        [(row["name"], str(row["devices"]), row["why_not"]) for row in found["accelerators"]],
    )
    _table(
        console,
        ("launcher", "here", "what it does"),
        [(row["name"], "yes", row["description"], row["why_not"]) for row in found["launchers"]],
    )
    _table(
        console,
        ("started by", "here", "command"),
        [(row["name"], "yes", row["command"], row["why_not"]) for row in found["clusters"]],
    )
    _table(
        console,
        ("strategy", "here", "what it is"),
        [(row["name"], ", ".join(row["runs_on"]), row["description"], row["why_not"]) for row in found["strategies"]],
    )


def _table(console: Any, columns: tuple[str, ...], rows: list[tuple[str | None, ...]]) -> None:
    """Print one table, and below it the numbered reasons that its cells refer to.

    `rows`: a cell for each column, then the reason, or None.
    """
    from rich.table import Column, Table
    from rich.text import Text

    sentences: dict[str, int] = {}
    name_column, *others = columns
    table = Table(Column(name_column, no_wrap=True), *(Column(column, overflow="fold") for column in others))
    for name, here, *cells, why_not in rows:
        if why_not is not None:
            here = f"no ({sentences.setdefault(why_not, len(sentences) + 1)})"
        style = "bold green" if why_not is None else "dim"
        table.add_row(Text(name or "", style=style), *(Text(cell or "") for cell in (here, *cells)))
    console.print(table)
    for sentence, number in sentences.items():
        # Not wrapped, so that commands can be copied.
        console.print(f"({number}) {sentence}", highlight=False, markup=False, soft_wrap=True)
