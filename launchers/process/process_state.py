"""The state of a process that does not answer, from Linux's /proc; elsewhere only that it does not answer."""

from __future__ import annotations

import os
from pathlib import Path

SILENT = "does not answer"
ENDED = "has ended"
UNREACHABLE = "cannot be reached"

_STATES = {
    "T": "stopped by a signal (SIGSTOP, or Ctrl-Z); `kill -CONT {pid}` lets it go on",
    "t": "stopped by a debugger",
    "D": "waits for a disk or a network file system, in the kernel",
    "R": "computes, in C code that holds Python's lock",
    "S": "sleeps, in C code that holds Python's lock",
}


def describe(pid: int) -> str:
    """Describe why a process of this machine did not answer."""
    state = state_of(pid)
    if state is None:
        return ENDED if Path("/proc/self/stat").exists() else SILENT
    if state in "ZX":
        return ENDED
    return f"{SILENT}: {_STATES.get(state, f'state {state}').format(pid=pid)}"


def state_of(pid: int) -> str | None:
    """The state's letter (`man 5 proc`); None if there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def num_switches(thread_id: int) -> int | None:
    """The number of context switches of a thread of this process: unchanged means that it has not run since.

    None if the kernel does not report it.
    """
    try:
        status = Path(f"/proc/{os.getpid()}/task/{thread_id}/status").read_text()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line) or None


def stopped_children() -> list[int]:
    """Children of this process that were stopped by a signal or a debugger."""
    children = []
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            children += [int(pid) for pid in task.read_text().split()]
        except OSError:
            continue
    return [pid for pid in children if state_of(pid) in ("T", "t")]
