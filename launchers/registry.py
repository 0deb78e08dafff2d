"""Launchers by name: one row each. Reading the table imports no launcher, and no torch.

To add one, write its file and its row. The row determines where its name may be passed, its description, and why it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, final

from fabric.launchers.process.program import Program

if TYPE_CHECKING:
    from fabric.launchers.launcher import Launcher


def _where_there_is_a_file(name: str, program: Program, system: str) -> str | None:
    if program.can_run_again:
        return None
    others = "'spawn'" if system == "Windows" else "'fork' (or 'forkserver' with `launch(function)`)"
    return (
        f"`launcher={name!r}` runs the script's file again in every process, but this is {program.words} and has no "
        f"file. Write `launcher={others}`, or put the code into a file."
    )


def _where_processes_fork(name: str, program: Program, system: str) -> str | None:
    if system != "Windows":
        return None
    return f"`launcher={name!r}` needs `os.fork`, which Windows has not. Write `launcher='spawn'` or 'script'."


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRow:
    """One launcher."""

    name: str
    path: str
    """`module:callable` within `fabric.launchers`; `callable(topology)` creates it."""
    description: str = ""
    """The line that `fabric doctor` shows."""
    is_written: bool = True
    """Whether users may pass its name: `Fabric(launcher=name)`."""
    for_any_strategy: bool = True
    """Whether it starts the ranks of any strategy with one process per device."""
    restarts: bool = False
    """Whether it restarts all ranks after a failure: `callable(topology, max_restarts)` creates it."""
    needs_function: bool = False
    """Whether ranks start at a function, and do not run the lines after `launch()`."""
    why: Callable[[str, Program, str], str | None] | None = None
    """`(name, program, system)`: the reason that `why_not` returns."""

    def why_not(self, program: Program, system: str) -> str | None:
        """Why it cannot start ranks in this program, or on this system; None if it can.

        Conditions that can change until `launch()` are checked by the launcher itself.
        """
        return self.why(self.name, program, system) if self.why is not None else None

    def make(self, *arguments: object) -> Launcher:
        """The launcher. Imports its file."""
        module, attribute = self.path.split(":")
        launcher: Launcher = getattr(import_module(f"fabric.launchers.{module}"), attribute)(*arguments)
        return launcher


_TABLE = (
    LauncherRow(
        name="script",
        path="script:Script",
        description="runs the script's file again in every process",
        why=_where_there_is_a_file,
    ),
    LauncherRow(
        name="fork",
        path="fork:Fork",
        description="continues at the line of `launch()`; safe with one thread and an unused accelerator",
        why=_where_processes_fork,
    ),
    LauncherRow(
        name="forkserver",
        path="processes:forkserver",
        description="runs a function in fresh processes, fast from the second time on",
        needs_function=True,
        why=_where_processes_fork,
    ),
    LauncherRow(
        name="spawn",
        path="processes:spawn",
        description="runs a function in fresh processes, on every system",
        needs_function=True,
    ),
    LauncherRow(
        name="elastic",
        path="elastic:Elastic",
        description="script, or forkserver for a function, and after a failure all ranks again",
        for_any_strategy=False,
        restarts=True,
    ),
    LauncherRow(name="xla", path="xla:XLA", is_written=False, for_any_strategy=False, needs_function=True),
    LauncherRow(name="inline", path="external:inline", is_written=False, for_any_strategy=False),
)
LAUNCHERS: Mapping[str, LauncherRow] = {row.name: row for row in _TABLE}
PER_DEVICE = tuple(row.name for row in _TABLE if row.for_any_strategy)
"""Launchers that start a process per device, for any strategy."""
OURS = tuple(row.name for row in _TABLE if row.is_written)
"""Launchers that start processes of fabric's own. A world created by fabric has one of these names."""


def launcher_row(name: str) -> LauncherRow:
    """The row of a name. Raises: ValueError: no launcher has this name; the message lists all names."""
    if name not in LAUNCHERS:
        raise ValueError(f"`launcher={name!r}` names no launcher. Write one of {', '.join(map(repr, LAUNCHERS))}.")
    return LAUNCHERS[name]
