"""Run a function in new processes, one per rank: fresh interpreters (spawn), or forks of a clean server (forkserver).

Function, arguments and results travel by pickle, so nothing that this process has done is in the way: threads, OpenMP,
an initialised device. Both start at the function; neither can go on from the line that launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.rank import task as tasks
from fabric.launchers.rank.fork_server import fork_server
from fabric.launchers.rank.program import this_program
from fabric.launchers.rank.task import CallFunction
from fabric.launchers.script import start_interpreter
from fabric.launchers.supervision import ending
from fabric.launchers.supervision.supervisor import Child, Supervisor
from fabric.launchers.world import World

R = TypeVar("R")


@final
class Processes(Launcher):
    """Ranks that start at a function, `start(world, task)` being the way in which one of them comes to be."""

    def __init__(
        self,
        topology: Topology,
        word: Literal["spawn", "forkserver"],
        start: Callable[[World, CallFunction], Child],
    ) -> None:
        self.topology, self.word, self.start = topology, word, start

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        result: R = self._results(False, worker, args)[0]
        return result

    def launch_all(self, worker: Callable[..., R], *args: Any) -> list[R]:
        """As `launch`, but the results of all ranks of this node come home, in rank order."""
        return self._results(True, worker, args)

    def enter(self) -> NoReturn:
        raise ValueError(
            f"`launcher={self.word!r}` starts its ranks at a function, and `launch()` got none. Write "
            "`fabric.launch(main)`, or pass `launcher='script'` or `launcher='fork'`."
        )

    def _results(self, everyone: bool, worker: Callable[..., R], args: tuple[Any, ...]) -> list[R]:
        task = tasks.call_function(worker, args, everyone=everyone, launcher=self.word)
        with Supervisor(self.topology, self.word, expects_results=True) as supervisor:
            for local_rank in range(self.topology.num_processes):
                supervisor.add(self.start(supervisor.world(local_rank), task))
            supervisor.wait()
        return ending.results(supervisor)


def spawn(topology: Topology) -> Processes:
    """Ranks as fresh interpreters: slow, and nothing of this process is in them."""
    program = this_program()
    return Processes(topology, "spawn", lambda world, task: start_interpreter(program, world, task))


PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
"""The first optimizer, and `DistributedDataParallel`, import dynamo: a second in every rank without this."""


def forkserver(topology: Topology, preload: tuple[str, ...] = PRELOAD) -> Processes:
    """Ranks as forks of a server that has imported `preload` once and done nothing else."""
    return Processes(topology, "forkserver", lambda world, task: fork_server().start(world, task, preload))
