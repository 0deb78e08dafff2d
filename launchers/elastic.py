"""Restarts all ranks after a failure (a lost device, a full disk, a flaky file system), up to a number of times.

Each attempt is a launch of its own, with its own rendezvous: nothing of a failed one is left. The progress of the ranks
is lost, too, so the script has to load its last checkpoint. All ranks are restarted and not only the failed one,
because the others have lost a peer in the middle of a collective.

Source of the idea: torchelastic, https://pytorch.org/docs/stable/elastic/run.html; there the number of nodes
may change as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.processes import forkserver
from fabric.launchers.rank import task as tasks
from fabric.launchers.rank.task import RunScript
from fabric.launchers.script import Script, start_interpreter
from fabric.launchers.supervision import ending
from fabric.launchers.supervision.failure import describe
from fabric.launchers.supervision.supervisor import Child, Supervisor, supervise
from fabric.launchers.world import World

R = TypeVar("R")


@final
class Elastic(Launcher):
    """Ranks that run the script again, or a function in new processes, up to `1 + max_restarts` times."""

    def __init__(self, topology: Topology, max_restarts: int) -> None:
        self.topology, self.max_restarts = topology, max_restarts

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        task = tasks.call_function(worker, args, everyone=False, launcher="elastic")
        start = forkserver(self.topology).start
        supervisor = self._supervise(True, lambda world: start(world, task))
        result: R = ending.results(supervisor)[0]
        return result

    def enter(self) -> NoReturn:
        program = Script(self.topology).program  # raises if there is no file to run again
        task = RunScript(program=program, awaits_function=False)
        ending.leave(self._supervise(False, lambda world: start_interpreter(program, world, task)))

    def _supervise(self, expects_results: bool, start: Callable[[World], Child]) -> Supervisor:
        """The last attempt, ended: it succeeded, or was signalled to end, or no restart is left."""
        attempt = 0
        while True:
            topology = replace(self.topology, attempt=attempt)
            supervisor = supervise(topology, "elastic", start, expects_results=expects_results)
            if not supervisor.failures or supervisor.ended_by is not None or attempt == self.max_restarts:
                return supervisor
            attempt += 1
            self._tell(supervisor, attempt)

    def _tell(self, supervisor: Supervisor, attempt: int) -> None:
        print(
            f"{describe(supervisor.failures, self.topology.size, supervisor.departures)}\n\n"
            f"All ranks start again: restart {attempt} of {self.max_restarts}.",
            file=sys.stderr,
            flush=True,
        )
