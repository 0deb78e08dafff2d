"""Fork this process once per rank: everything is there already, and the ranks go on from the very line.

Nothing is imported again, so two ranks start in 25-50 ms. The price: the process must not have started threads of its
own, run a parallel region of OpenMP or initialised a device (`fork_safety.py`).
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, final

from fabric.launchers import ending
from fabric.launchers.kernel import exit_fd
from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.rank import become_rank, run_and_end
from fabric.launchers.report import Reporter
from fabric.launchers.signals import ENDING, PASSED_ON
from fabric.launchers.supervisor import Child, Supervisor
from fabric.launchers.world import World

R = TypeVar("R")


@final
class Fork(Launcher):
    """Ranks as copies of this process."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        with Supervisor(self.topology, "fork", expects_results=True) as supervisor:
            started = _fork_all(supervisor)
            if started is not None:
                world, link = started
                atexit._clear()  # what the parent registered is the parent's to run, once
                run_and_end(link, False, worker, world, *args)
            supervisor.wait()
        result: R = ending.results(supervisor)[0]
        return result

    def enter(self) -> World:
        with Supervisor(self.topology, "fork", expects_results=False) as supervisor:
            started = _fork_all(supervisor)
            if started is None:
                supervisor.wait()
        if started is None:
            ending.leave(supervisor)
        gc.freeze()  # what was there before the fork is not looked at again when the rank ends: 0.2 s less
        return started[0]


def _fork_all(supervisor: Supervisor) -> tuple[World, Reporter] | None:
    """Fork every rank of this node. Returns in each of them with its place, and in the supervisor with None."""
    sys.stdout.flush()  # what waits in the buffers would be written by every rank
    sys.stderr.flush()
    parent = os.getpid()
    numbers = random.getstate()
    for local_rank in range(supervisor.topology.num_processes):
        world = supervisor.world(local_rank)
        reader, writer = os.pipe()
        # A signal between the fork and the return of the handlers would be noted by nobody.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING + PASSED_ON)
        try:
            pid = _fork()
            if pid == 0:
                os.close(reader)
                random.setstate(numbers)  # Python seeds a forked process anew; the user's seed is meant for the ranks
                supervisor.abandon()
                return world, become_rank(world, writer, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING + PASSED_ON)
        os.close(writer)
        supervisor.add(child_of(world.rank, pid, reader))
    return None


def child_of(rank: int, pid: int, report_fd: int) -> Child:
    """A rank that is a child of this process."""

    def reap() -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return Child(rank=rank, pid=pid, exit_fd=exit_fd(pid), reap=reap, report_fd=report_fd)


def _fork() -> int:
    with warnings.catch_warnings():
        # From 3.12 on Python warns of every thread, those of OpenBLAS too, which are safe (`fork_safety.py`).
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        return os.fork()
