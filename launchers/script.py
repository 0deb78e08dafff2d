"""Runs the user's script again, once per rank, in new interpreters with the same flags and arguments.

Works if there is a file to run, and does not depend on the state of this process. In return, every rank imports torch.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.launcher_names import launcher_row
from fabric.launchers.process.os_process import exit_fd
from fabric.launchers.process.program import STARTED_IN, Program, this_program
from fabric.launchers.rank import task as tasks
from fabric.launchers.rank.task import CallFunction
from fabric.launchers.supervision import ending
from fabric.launchers.supervision.supervisor import Child, supervise
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
        ending.leave(supervisor)


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
