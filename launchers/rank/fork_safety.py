"""Whether this process can be forked into ranks that compute.

A fork copies the calling thread only, and libraries in the child rely on threads that are gone: after OpenMP's first
parallel region (a large tensor operation, a backward), the child hangs in its next one. OpenBLAS starts threads when
it is imported, and is safe: it ends them before a fork and starts them again afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = ("", "64_")
PREFIXES = ("", "scipy_")
NOTEBOOK = ("ipykernel", "IPython", "zmq", "tornado")
"""Packages whose threads a notebook's kernel always has. A rank uses none of them."""
SAFE_THREADS = ("ZMQbg", "jemalloc_bg_thd")
"""Names of native threads that are safe to fork: a notebook's message queue, and the one in which jemalloc frees
memory. `import pyarrow` starts that one (so does Hugging Face's datasets), and jemalloc prepares for forks."""
ENDING_S = 0.25
"""Seconds for which a thread may still be listed after it was joined: `join` returns before the kernel removes it."""


def fork_is_safe() -> str | None:
    """None if a fork is safe now; otherwise the reason why it is not."""
    if not hasattr(os, "fork") or sys.platform != "linux":
        return f"on {sys.platform} a forked process may not use the system's own libraries"
    device = _initialized_accelerator()
    if device is not None:
        return f"the accelerator {device} is initialised in this process, and a forked process cannot use it"
    threads = [thread.name for thread in threading.enumerate() if not _belongs_here(thread)]
    if threads:
        return f"this process runs other Python threads ({', '.join(threads)}), whose locks a fork would copy"
    num_native = _native_threads()
    if num_native > 0:
        return (
            f"this process has {num_native} native thread(s), which tensor operations have left behind, "
            "and a forked process would wait for them for ever"
        )
    return None


def fork_can_continue() -> str | None:
    """None if a forked process can continue at the line of the fork too; otherwise the reason why it cannot."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return "it is called in a coroutine, and asyncio does not continue its event loop in a forked process"
    return fork_is_safe()


def _belongs_here(thread: threading.Thread) -> bool:
    if thread is threading.current_thread():
        return True
    # A kernel's threads are classes of their own (Heartbeat), or plain ones that run a function of the kernel (IOPub).
    target = getattr(thread, "_target", None)
    owners = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(owner.partition(".")[0] in NOTEBOOK for owner in owners)


def _initialized_accelerator() -> str | None:
    """The accelerator that torch has initialised in this process. Initialises and imports nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for name in ("cuda", "xpu", "mtia", "npu", "hpu"):
        module = sys.modules.get(f"torch.{name}")
        asked = getattr(module, "is_initialized", None)
        if asked is not None and asked():
            return name
    return None


def _native_threads() -> int:
    """The number of threads of neither Python, a notebook nor OpenBLAS, without those that are ending."""
    num_known = threading.active_count() + sum(_openblas_threads())
    deadline = time.monotonic() + ENDING_S
    while (num_native := _num_threads() - num_known) > 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    return num_native


def _num_threads() -> int:
    """The number of threads of this process in /proc, without those that are safe to fork."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            names.append((task / "comm").read_text())
    return sum(not name.startswith(SAFE_THREADS) for name in names)


def _openblas_threads() -> Iterator[int]:
    """For each OpenBLAS in this process, the number of its threads besides the caller's.

    It ends them before every fork, in this process as well, and starts them again when it is next used. Setting the
    number of threads to the present one starts them now: otherwise a thread that is gone would be subtracted from
    OpenMP's.
    """
    for library in sorted({line.split()[-1] for line in _maps() if "openblas" in line.rpartition("/")[2]}):
        handle = ctypes.CDLL(library)
        for prefix, suffix in itertools.product(PREFIXES, SUFFIXES):
            number = getattr(handle, f"{prefix}openblas_get_num_threads{suffix}", None)
            if number is not None:
                count = number()
                getattr(handle, f"{prefix}openblas_set_num_threads{suffix}")(count)
                yield max(0, count - 1)
                break


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()
