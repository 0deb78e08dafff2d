"""Start all ranks again after a failure, at most a number of times: a lost device, a full disk, a flaky file system.

Every attempt is a launch of its own, with a rendezvous of its own: nothing of a failed one is left. What the ranks had
done until then is gone, too, so a script that is to profit loads its last checkpoint. All ranks start again and not
only the one that failed, because the others have lost a peer in the middle of a collective.

Source of the idea: torchelastic, https://pytorch.org/docs/stable/elastic/run.html; its number of nodes may change as
well, ours does not.
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
from fabric.launchers.supervision.supervisor import Child, Supervisor
from fabric.launchers.world import World

R = TypeVar("R")


@final
class Elastic(Launcher):
    """Ranks that run the script again, or a function in fresh processes, up to `1 + max_restarts` times."""

    def __init__(self, topology: Topology, max_restarts: int) -> None:
        self.topology, self.max_restarts = topology, max_restarts

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        task = tasks.call_function(worker, args, everyone=False, launcher="elastic")
        start = forkserver(self.topology).start
        supervisor = self._supervise(True, lambda world: start(world, task))
        result: R = ending.results(supervisor)[0]
        return result

    def enter(self) -> NoReturn:
        program = Script(self.topology).program  # raises where there is no file to run again
        task = RunScript(program=program, awaits_function=False)
        ending.leave(self._supervise(False, lambda world: start_interpreter(program, world, task)))

    def _supervise(self, expects_results: bool, start: Callable[[World], Child]) -> Supervisor:
        """The last attempt, ended: it went well, or was told to end, or no further one is left."""
        attempt = 0
        while True:
            topology = replace(self.topology, attempt=attempt)
            with Supervisor(topology, "elastic", expects_results=expects_results) as supervisor:
                for local_rank in range(topology.num_processes):
                    supervisor.add(start(supervisor.world(local_rank)))
                supervisor.wait()
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
