"""Restarts all ranks after a failure (a lost device, a full disk, a flaky file system), up to a number of times.

Each attempt is a launch of its own, with its own rendezvous: nothing of a failed one is left. The progress of the ranks
is lost, too, so the script has to load its last checkpoint. All ranks are restarted and not only the failed one,
because the others have lost a peer in the middle of a collective.

Source of the idea: torchelastic, https://pytorch.org/docs/stable/elastic/run.html; there the number of nodes
may change as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.processes import Processes, forkserver
from fabric.launchers.script import Script
from fabric.launchers.world import World

R = TypeVar("R")


@final
class Elastic(Launcher):
    """Ranks that run the script again, or a function in new processes, up to `1 + max_restarts` times."""

    def __init__(self, topology: Topology, max_restarts: int) -> None:
        self.topology, self.max_restarts = topology, max_restarts

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        start = forkserver(self.topology).start
        return Processes(self.topology, "elastic", start, self.max_restarts).launch(worker, *args)

    def enter(self) -> World:
        return Script(self.topology, "elastic", self.max_restarts).enter()
