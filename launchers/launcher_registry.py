"""Launchers by name: one row each. Reading the table imports no launcher, and no torch.

To add one, write its file and its row. The row determines where its name may be passed, its description, and why it is
refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, final

from fabric.launchers.process.program import Program

if TYPE_CHECKING:
    from fabric.launchers.launcher import Launcher, Topology


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
    needs_function: bool = False
    """Whether ranks start at a function, and do not run the lines after `launch()`."""
    needs_file: bool = False
    """Whether ranks run the script's file again."""

    def why_not(self, program: Program) -> str | None:
        """Why it cannot start ranks in this program; None if it can.

        Conditions that can change until `launch()` are checked by the launcher itself.
        """
        if not self.needs_file or program.can_run_again:
            return None
        return (
            f"`launcher={self.name!r}` runs the script's file again in every process, but this is {program.words} and "
            "has no file. Write `launcher='fork'` (or 'forkserver' with `launch(function)`), or put the code into a "
            "file."
        )

    def make(self, topology: "Topology") -> "Launcher":
        """The launcher. Imports its file."""
        launcher: Launcher = resolve_name(f"fabric.launchers.{self.path}")(topology)
        return launcher


_TABLE = (
    LauncherRow(
        name="script",
        path="start_methods:Script",
        description="runs the script's file again in every process",
        needs_file=True,
    ),
    LauncherRow(
        name="fork",
        path="fork:Fork",
        description="continues at the line of `launch()`; safe with one thread and an unused accelerator",
    ),
    LauncherRow(
        name="forkserver",
        path="start_methods:forkserver",
        description="runs a function in fresh processes, fast from the second time on",
        needs_function=True,
    ),
    LauncherRow(
        name="spawn",
        path="start_methods:spawn",
        description="runs a function in fresh processes, which inherit nothing",
        needs_function=True,
    ),
    LauncherRow(
        name="elastic",
        path="start_methods:Script",
        description="script, or forkserver for a function, and after a failure all ranks again",
        for_any_strategy=False,
    ),
    LauncherRow(name="xla", path="xla:XLA", is_written=False, for_any_strategy=False, needs_function=True),
    LauncherRow(name="inline", path="launcher:inline", is_written=False, for_any_strategy=False),
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
