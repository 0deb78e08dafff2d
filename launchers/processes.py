"""Runs a function in new processes, one per rank: new interpreters (spawn), or forks of a clean server (forkserver).

Function, arguments and results are pickled, so that the state of this process (threads, OpenMP, an initialised device)
does not matter. Ranks start at the function; they cannot continue at the line of `launch()`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.process.program import this_program
from fabric.launchers.rank import task as tasks
from fabric.launchers.rank.task import CallFunction
from fabric.launchers.script import start_interpreter
from fabric.launchers.supervision import ending
from fabric.launchers.supervision.fork_server import fork_server
from fabric.launchers.supervision.supervisor import Child, say, supervise
from fabric.launchers.world import World

R = TypeVar("R")


@final
@dataclass(frozen=True, slots=True)
class Processes(Launcher):
    """Ranks that start at a function."""

    topology: Topology
    word: Literal["spawn", "forkserver", "elastic"]
    start: Callable[[World, CallFunction], Child]
    """Starts the process of one rank."""
    max_restarts: int = 0
    """How often all ranks start again after a failure."""
    is_chosen: bool = False
    """Whether fabric has chosen this launcher, and not the user."""

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        return self._results(False, worker, args)[0]

    def launch_all(self, worker: Callable[..., R], *args: Any) -> list[R]:
        """As `launch`, but returns the results of all ranks of this node, in rank order."""
        return self._results(True, worker, args)

    def enter(self) -> NoReturn:
        raise ValueError(
            f"`launcher={self.word!r}` starts its ranks at a function, and `launch()` got none. Write "
            "`fabric.launch(main)`, or pass `launcher='script'` or `launcher='fork'`."
        )

    def _results(self, everyone: bool, worker: Callable[..., R], args: tuple[Any, ...]) -> list[R]:
        task = tasks.call_function(worker, args, everyone=everyone, launcher=self.word)
        if self.is_chosen and task.main_file is not None:
            say(
                f"`launch(function)` starts new processes, where the globals of {task.main_file} are as its import "
                "leaves them: pass what was set since as arguments. `launcher='fork'` copies this process."
            )
        supervisor = supervise(
            self.topology,
            self.word,
            lambda world: self.start(world, task),
            expects_results=True,
            max_restarts=self.max_restarts,
        )
        return ending.results(supervisor)


def spawn(topology: Topology) -> Processes:
    """Ranks as new interpreters: slow, and without any state of this process."""
    program = this_program()
    return Processes(topology, "spawn", lambda world, task: start_interpreter(program, world, task))


PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
"""The first optimizer, and `DistributedDataParallel`, import dynamo: a second in every rank without this."""


def forkserver(topology: Topology, preload: tuple[str, ...] = PRELOAD, *, is_chosen: bool = False) -> Processes:
    """Ranks as forks of a server that has imported `preload` once and done nothing else."""

    def start(world: World, task: CallFunction) -> Child:
        return fork_server().start(world, task, preload)

    return Processes(topology, "forkserver", start, is_chosen=is_chosen)
