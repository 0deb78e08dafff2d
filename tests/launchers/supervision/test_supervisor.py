"""The supervisor's wait, and what it reads of a rank's last moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fabric.launchers.launcher import Topology
from fabric.launchers.rank.task import CallFunction
from fabric.launchers.start_methods import Processes, forkserver
from fabric.launchers.supervision.guardian import Guardian
from fabric.launchers.supervision.supervisor import Child, Supervisor
from fabric.launchers.world import World

LEAVE = """
import os, sys
status, report = map(int, sys.argv[1:])
sys.stdin.read()
os.write(status, b"x")
os.close(report)
sys.exit(5)
"""


def test_a_rank_that_is_reaped_before_its_pipe_is_closed_is_reported_with_its_exit_code() -> None:
    """Both are ready in one wait, the exit first: as where the rank's data-loader workers end after it."""
    (exit_fd, status), (report_fd, report) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LEAVE, str(status), str(report)],
        stdin=subprocess.PIPE,
        pass_fds=(status, report),
    )
    os.close(status)
    os.close(report)
    with Supervisor(Topology(num_processes=1), "script", expects_results=False) as supervisor:
        supervisor.add(Child(rank=0, pid=process.pid, exit_fd=exit_fd, reap=process.wait, report_fd=report_fd))
        supervisor._after(0, process.communicate)  # between two waits
        supervisor.wait()
    assert [failure.summary for failure in supervisor.failures] == ["left with exit code 5"]


def test_a_rank_that_cannot_be_started_ends_those_that_were() -> None:
    fork = forkserver(Topology(num_processes=2))

    def start(world: World, task: CallFunction) -> Child:
        if world.rank == 1:
            raise BlockingIOError("no more processes")
        return fork.start(world, task)

    with pytest.raises(BlockingIOError, match="no more processes"):
        Processes(Topology(num_processes=2), "forkserver", start).launch(_wait)


def _wait(world: World) -> None:
    signal.pause()


def test_a_guardian_that_was_killed_does_not_replace_what_is_reported() -> None:
    guardian = Guardian()
    guardian._process.kill()
    guardian._process.wait()
    guardian.watch(os.getpid())
    guardian.forget(os.getpid())
    guardian.close()
