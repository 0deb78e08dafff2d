"""Forks this process once per rank: the ranks have all of its state, and continue at the line of `launch()`.

Nothing is imported again, so two ranks start in 25-50 ms. In return, the process must not have started threads, run a
parallel region of OpenMP, or initialised a device (`why_fork_is_unsafe`): a fork copies the calling thread only, and
libraries in the child rely on threads that are gone. After OpenMP's first parallel region (a large tensor operation, a
backward), the child hangs in its next one. OpenBLAS starts threads when it is imported, and is safe: it ends them
before a fork and starts them again afterwards.

What was open before the fork belongs to the launching process, which waits for its ranks and then ends:

- functions of `atexit` and the end of a `with` block around `launch()` run there, once, after all ranks have ended; a
  rank runs the functions that it has registered itself;
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

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.process.interpreter import disown, flush, open_files
from fabric.launchers.process.os_process import exit_fd
from fabric.launchers.process.reports import Reporter
from fabric.launchers.process.stack import frames_of
from fabric.launchers.rank.rank import become_rank, run_and_end
from fabric.launchers.supervision.supervisor import ENDING, PASSED_ON, Child, Supervisor, leave_with, results_of
from fabric.launchers.world import World

R = TypeVar("R")

NOTEBOOK = ("ipykernel", "IPython", "zmq", "tornado")
"""Packages whose threads run in every notebook kernel. A rank uses none of these packages."""
SAFE_THREADS = ("ZMQbg", "jemalloc_bg_thd")
"""Names of native threads that are safe to fork: a notebook's message queue, and the one in which jemalloc frees
memory. `import pyarrow` starts jemalloc's (so does Hugging Face's datasets), and jemalloc prepares for forks."""
ENDING_S = 0.25
"""Seconds for which a thread may still be listed after it was joined: `join` returns before the kernel removes it."""


@final
class Fork(Launcher):
    """Ranks as copies of this process, which the caller knows to be safe to fork."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        with Supervisor(self.topology, "fork", expects_results=True) as supervisor:
            started = _fork_all(supervisor)
            if started is not None:
                world, reporter = started
                run_and_end(reporter, False, worker, world, *args)
            supervisor.wait()
        result: R = results_of(supervisor)[0]
        return result

    def enter(self) -> World:
        with Supervisor(self.topology, "fork", expects_results=False) as supervisor:
            started = _fork_all(supervisor)
            if started is None:
                supervisor.wait()
        if started is None:
            leave_with(supervisor)
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


def why_fork_is_unsafe(device_type: str | None = None) -> str | None:
    """Why this process cannot be forked now into ranks that compute; None if it can.

    `device_type`: what ranks use; None: whatever device there is.
    """
    if not hasattr(os, "fork") or sys.platform != "linux":
        return f"on {sys.platform} a forked process may not use the system's own libraries"
    if threading.current_thread() is not threading.main_thread():
        return f"this process has started the thread {threading.current_thread().name!r}, and a fork copies it alone"
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    threads = [thread.name for thread in others if not _is_of_a_notebook(thread)]
    if threads:
        return f"this process runs other Python threads ({', '.join(threads)}), whose locks a fork would copy"
    accelerator = _lost_in_a_fork(device_type)
    if accelerator is not None:
        return (
            f"a forked process cannot use {accelerator}, which this process has initialised: a tensor on it does so, "
            "`is_available()`, and a `DataLoader` with `pin_memory=True`"
        )
    num_native = _native_threads()
    if num_native > 0:
        return (
            f"this process has {num_native} native thread(s), which tensor operations have left behind, "
            "and a forked process would wait for them for ever"
        )
    return None


def _is_of_a_notebook(thread: threading.Thread) -> bool:
    """Whether the thread runs a function of these packages."""
    frames = frames_of(sys._current_frames().get(thread.ident or 0))
    outermost = next((file for file, _, _ in reversed(frames) if file != threading.__file__), "")
    return any(f"/{package}/" in outermost for package in NOTEBOOK)


def _lost_in_a_fork(device_type: str | None) -> str | None:
    """The accelerator that ranks on this type of device could not use in a fork. Initialises and imports nothing.

    Only a fork tells: a query, such as `torch.cuda.is_available()`, initialises the driver, but `is_initialized` is
    False after it. In a fork torch notes this for `_is_in_bad_fork`, which is documented for the module of a device
    that another package adds (`torch.utils.rename_privateuse1_backend`). Torch notes it on machines without a device,
    too, and for its own query of a CUDA build where there is no driver: no rank can lose a device that is not there.
    The fork also makes OpenBLAS end its threads.
    """
    torch: Any = sys.modules.get("torch")
    accelerator = torch and torch.accelerator.current_accelerator(check_available=False)
    module: Any = torch.get_device_module(accelerator) if accelerator else None
    is_lost = getattr(module, "_is_in_bad_fork", getattr(module, "is_initialized", bool))
    pid = fork()
    if pid == 0:
        try:
            os._exit(is_lost())
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1] == 0 or device_type not in (None, accelerator.type) or module.device_count() == 0:
        return None
    return str(accelerator.type)


def fork() -> int:
    """`os.fork` without Python's warning about threads, which since 3.12 counts OpenBLAS's safe threads, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        return os.fork()


def _native_threads() -> int:
    """The number of native threads, without threads that are safe to fork or that are ending."""
    deadline = time.monotonic() + ENDING_S
    while True:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
                names.append((task / "comm").read_text())
        num_native = sum(not name.startswith(SAFE_THREADS) for name in names) - threading.active_count()
        if num_native <= 0 or time.monotonic() > deadline:
            return num_native
        time.sleep(0.005)
