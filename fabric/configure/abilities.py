"""What a machine can run, and the reason for what it cannot: for `fabric doctor`, and for the report of a run.

It calls the functions that `Fabric(...)` calls: what a strategy supports is computed by `resolve` (which calls
`Strategy.refuse`) and `Strategy.lacks`. The result is plain data. It initialises no device.
"""

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import packages_distributions
from typing import Any, get_args

import torch

from fabric.configure.machine import Found, Machine
from fabric.configure.request import Request
from fabric.configure.resolve import resolve
from fabric.launchers.launcher_registry import LAUNCHERS
from fabric.launchers.process.os_process import num_cores
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.accelerators.accelerator_registry import accelerators
from fabric.strategies.capabilities import Capability
from fabric.strategies.precision.precision import Precision, PrecisionWord
from fabric.strategies.registered_names import Registration
from fabric.strategies.strategy import Strategy

PRECISIONS: tuple[PrecisionWord, ...] = get_args(PrecisionWord)


def with_every_accelerator(machine: Machine) -> Machine:
    """The machine with every accelerator by name, whether usable or not."""
    return replace(machine, found=tuple(Found.look(accelerator) for accelerator in accelerators()))


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
        "strategies": [_describe_strategy(machine, registration) for registration in strategies.values()],
    }


def _describe_strategy(machine: Machine, registration: Registration) -> dict[str, Any]:
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
    for word in PRECISIONS:
        with suppress(ValueError):
            resolve(Request(accelerator=accelerator, strategy=strategy, precision=Precision.parse(word)), machine)
            words.append(word)
    return words
