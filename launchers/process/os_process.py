"""Process control that only some operating systems have, each with its substitute elsewhere."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process with SIGKILL when the thread that started it ends, however it ends.

    Without Linux nothing is set: the guardian ends what is left.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


def exit_fd(pid: int) -> int:
    """A descriptor that becomes readable when the child `pid` has ended. The child is left for us to reap.

    Without pidfds a thread waits for the child.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    reader, writer = os.pipe()

    def tell() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writer)

    threading.Thread(target=tell, name=f"fabric-wait-{pid}", daemon=True).start()
    return reader


def kill_group(pid: int, number: int) -> None:
    """Send a signal to a rank's process group. No error if the rank has ended, or has no group yet."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def signal_rank(pid: int, number: int) -> None:
    """Send a signal to a rank alone, not to its data-loader workers."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def num_cores() -> int:
    """The number of CPU cores that this process may use."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
