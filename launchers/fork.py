"""Forks this process once per rank: the ranks have all of its state, and continue at the line of `launch()`.

Nothing is imported again, so two ranks start in 25-50 ms. In return, the process must not have started threads, run a
parallel region of OpenMP, or initialised a device (`fork_safety.py`).

What was open before the fork belongs to the launching process, which waits for its ranks and then ends:

- functions of `atexit` and the end of a `with` block around `launch()` run there, once, after all ranks have ended; a
  rank runs those that it has registered itself;
- buffers of open files, of log handlers and of C's streams are flushed before the fork;
- a `TemporaryDirectory` or `NamedTemporaryFile` is deleted there; a rank's copy deletes nothing, unless the rank calls
  `cleanup()` or leaves its `with` block; other finalizers (`weakref.finalize`) run there alone, too;
- children of `multiprocessing` are joined and ended there; proxies of a `Manager` reconnect in each rank.

The following cannot be separated after a fork; open it after `launch()`:

- the position of an open file: ranks that read it each get a piece of it, ranks that write it write one after another;
- a compressed or zip file that is being written, whose end each rank would write, and files of libraries that buffer by
  themselves (HDF5, Arrow);
- connections: sockets, HTTP sessions, SQLite and other databases;
- exit functions and finalizers that a rank needs of a library imported before (coverage measurement).
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable
from typing import Any, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.process.interpreter import disown, flush, open_files
from fabric.launchers.process.os_process import exit_fd
from fabric.launchers.process.reports import Reporter
from fabric.launchers.rank.fork_safety import fork
from fabric.launchers.rank.rank import become_rank, run_and_end
from fabric.launchers.supervision import ending
from fabric.launchers.supervision.signals import ENDING, PASSED_ON
from fabric.launchers.supervision.supervisor import Child, Supervisor
from fabric.launchers.world import World

R = TypeVar("R")


@final
class Fork(Launcher):
    """Ranks as copies of this process, of which the caller knows that it is safe to fork (`fork_safety.py`)."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        with Supervisor(self.topology, "fork", expects_results=True) as supervisor:
            started = _fork_all(supervisor)
            if started is not None:
                world, reporter = started
                run_and_end(reporter, False, worker, world, *args)
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
        return started[0]


def _fork_all(supervisor: Supervisor) -> tuple[World, Reporter] | None:
    """Fork every rank of this node. Returns the world and the reporter in each of them, and None in the supervisor."""
    files = open_files(gc.get_objects())
    flush(files)  # a rank has a copy of each buffer, and would write it once more
    parent, numbers = os.getpid(), random.getstate()
    for local_rank in range(supervisor.topology.num_processes):
        reader, writer = os.pipe()
        with supervisor.starting(local_rank) as world:
            # A signal between the fork and the restoration of the handlers would be lost.
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING + PASSED_ON)
            try:
                pid = fork()
                if pid == 0:
                    os.close(reader)
                    random.setstate(numbers)  # Python reseeds a forked process, but the user's seed is for the ranks
                    supervisor.abandon()
                    disown(files)
                    return world, become_rank(world, writer, parent)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING + PASSED_ON)
            os.close(writer)
            supervisor.add(Child(rank=world.rank, pid=pid, exit_fd=exit_fd(pid), report_fd=reader))
    return None
