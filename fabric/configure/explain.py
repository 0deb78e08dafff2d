"""Every setting of a run, its value, and where it came from: `fabric explain`, and the first part of a report.

Sources: "argument" (of `Fabric(...)` or of the strategy), "command line" (of `fabric run`), "environment variable", the
launcher that has made this process a rank, with its variables, and "default"; "default (auto)" was chosen by `resolve`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from fabric.configure.machine import Machine
from fabric.configure.request import Request
from fabric.configure.resolve import Resolved, Setting, resolve
from fabric.launchers.world import World
from fabric.strategies.precision.precision import Precision

PREFIXES = ("CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PJRT_", "PYTORCH_", "TORCH_", "XLA_")
"""Variables that torch and the libraries under it read: whatever is set is a setting of the run."""
_OF_THE_WORLD = ("devices", "num_nodes", "node_rank", "main_address", "main_port", "launcher")


def configure(request: Request, environ: Mapping[str, str]) -> Resolved:
    """The complete configuration on this machine, with its settings. Raises: as `resolve`.

    Under `fabric explain` it prints them, and the program ends here.
    """
    machine = Machine.look(environ, request)
    resolved = resolve(request, machine)
    resolved = replace(resolved, settings=tuple(explain(request, machine, resolved, environ)))
    if request.explain:
        if resolved.world is None or resolved.world.is_global_zero:
            show(resolved.settings)
        raise SystemExit(0)
    return resolved


def explain(request: Request, machine: Machine, resolved: Resolved, environ: Mapping[str, str]) -> Iterator[Setting]:
    """The settings, in the order of `Request`."""
    world, topology, strategy = resolved.world, resolved.topology, resolved.strategy
    chosen: dict[str, Any] = {
        "accelerator": resolved.accelerator.name,
        "strategy": type(strategy).__name__,
        "devices": resolved.devices,
        "num_nodes": topology.num_nodes,
        "node_rank": topology.node_rank,
        "main_address": topology.main_address,
        "main_port": topology.main_port or "a free port",
        "launcher": world.launcher if world is not None else resolved.launcher,
        "max_restarts": resolved.max_restarts if resolved.launcher == "elastic" else None,
        "timeout_seconds": getattr(strategy, "timeout_seconds", None),
    }
    decided_by, variables = _decided_by(world), " ".join(machine.variables)
    source = f"{decided_by}: {variables}" if decided_by and variables else decided_by
    yield Setting("world_size", str(topology.size), source or "devices, num_nodes and strategy")
    for field in fields(Request):
        name, asked = field.name, getattr(request, field.name)
        if name in ("sources", "explain"):
            continue
        source = request.sources.get(name) or (name in _OF_THE_WORLD and decided_by) or "default"
        auto = " (auto)" if asked == "auto" and source == "default" else ""
        yield Setting(name, words(chosen.get(name, asked)), source + auto)
        if name == "strategy":
            for option in fields(strategy):
                value = words(getattr(strategy, option.name))
                if option.name != "timeout_seconds":
                    source = "default" if value == words(option.default) else request.sources.get(name, "default")
                    yield Setting(f"strategy.{option.name}", value, source)
    for name in sorted(environ):
        if name.startswith(PREFIXES):
            yield Setting(name, environ[name], "environment variable")


def _decided_by(world: World | None) -> str | None:
    """The source of what a launcher has decided; None without one."""
    if world is None:
        return None
    return "environment variables" if world.launcher == "local" else f"launcher ({world.launcher})"


def words(value: Any) -> str:
    """A value as it is written: names for classes, functions and precisions."""
    if isinstance(value, tuple | list | set | frozenset):
        return ", ".join(map(words, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, str | int | float | dict):
        return str(value)
    if isinstance(value, Precision):
        return value.name
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def show(settings: tuple[Setting, ...]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(Column("setting", no_wrap=True), Column("value", overflow="fold"), Column("from", overflow="fold"))
    for setting in settings:
        table.add_row(*(Text(cell, style="dim" if setting.source == "default" else "") for cell in setting))
    Console().print(table)
