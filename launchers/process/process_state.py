"""The state of a process that does not answer, from Linux's /proc; elsewhere only that it does not answer."""

from __future__ import annotations

from pathlib import Path

SILENT = "does not answer"
ENDED = "has ended"
CLOSED = "has closed its fabric, or is ending"
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
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ENDED if Path("/proc/self/stat").exists() else SILENT
    if state in "ZX":
        return ENDED
    return f"{SILENT}: {_STATES.get(state, f'state {state}').format(pid=pid)}"
