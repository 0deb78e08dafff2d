"""Ranks in new processes: new interpreters that run the user's script again (script) or start at a function (spawn),
or forks of a clean server that start at a function (forkserver).

The script needs a file to run; its ranks continue at the line of `launch()`. A function, its arguments and results are
pickled. Neither depends on the state of this process (threads, OpenMP, an initialised device). In return, every new
interpreter imports torch.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.launcher_registry import launcher_row
from fabric.launchers.process.os_process import exit_fd
from fabric.launchers.process.program import STARTED_IN, Program, this_program
from fabric.launchers.rank import task as tasks
from fabric.launchers.rank.task import CallFunction
from fabric.launchers.supervision.fork_server import fork_server
from fabric.launchers.supervision.supervisor import Child, leave_with, results_of, say, supervise
from fabric.launchers.world import World

R = TypeVar("R")

BOOT = str(Path(__file__).parent / "rank" / "boot.py")


@final
class Script(Launcher):
    """Ranks that run the script again, and all of them once more after a failure, up to `max_restarts` times."""

    def __init__(self, topology: Topology, word: str = "script", max_restarts: int = 0) -> None:
        self.topology, self.word, self.max_restarts, self.program = topology, word, max_restarts, this_program()
        why_not = launcher_row("script").why_not(self.program)
        if why_not is not None:
            raise ValueError(why_not)

    def launch(self, worker: Callable[..., R], *args: Any) -> NoReturn:
        raise ValueError(
            "`launch(function)` with `launcher='script'`: its ranks run the script again, and continue at the line of "
            "`launch()`. Call that without a function, or pass `launcher='forkserver'`, which starts at the function."
        )

    def enter(self) -> World:
        start = partial(start_interpreter, self.program, task=self.program)
        supervisor = supervise(self.topology, self.word, start, expects_results=False, max_restarts=self.max_restarts)
        leave_with(supervisor)


def start_interpreter(program: Program, world: World, task: CallFunction | Program) -> Child:
    """Start a new interpreter that runs a task."""
    reader, writer = os.pipe()
    with tasks.write(world, task) as file:
        process = subprocess.Popen(
            [sys.executable, *program.flags, BOOT, str(file.fileno()), str(writer), str(os.getpid())],
            pass_fds=(file.fileno(), writer),
            env=tasks.environ_of(world),
            cwd=STARTED_IN,
        )
    os.close(writer)
    return Child(rank=world.rank, pid=process.pid, exit_fd=exit_fd(process.pid), reap=process.wait, report_fd=reader)


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
        return results_of(supervisor)


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
