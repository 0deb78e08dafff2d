"""Ends a process as Python does, but without destructors, which take 0.3 s, and hang where peers have ended.

The private names are checked at import. None has a public counterpart: Python offers no way to end a process with an
exit code after its exit functions but before its destructors. `multiprocessing` uses the same names.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import multiprocessing.util
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from fabric.launchers.private_names import TESTED_TORCH, Names, require

NAMES: Names = {
    "atexit": {
        "_clear": "a forked rank forgets its parent's exit functions",
        "_run_exitfuncs": "a rank ends with its exit functions and without destructors",
    },
    "weakref:finalize": {"_registry _registered_with_atexit": "a forked rank forgets its parent's finalizers"},
    "threading": {"_shutdown": "a rank joins its threads before it runs its exit functions"},
    "multiprocessing.process": {"_children": "a forked rank forgets its parent's children"},
    "multiprocessing.util": {
        "_exit_function": "ends the children of a rank",
        "_run_after_forkers": "connections to a `Manager` are reopened",
    },
}
OF_LOADERS: Names = {"torch.utils.data._utils": {"_set_python_exit_flag": "tells data loaders that the process ends"}}

require("Python", "3.10 to 3.13", NAMES)

TEMPORARY: tuple[Any, ...] = tuple(
    kind for kind in vars(tempfile).values() if isinstance(kind, type) and kind.__module__ == "tempfile"
)
"""What `NamedTemporaryFile` returns, and temporary folders."""
BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, logging.Handler)
"""What can hold bytes or log records back."""

_inherited: list[Any] = []
"""Files that the parent of this process had open."""

_forgotten: list[Any] = []
"""The finalizers of the parent: to free hundreds of objects would copy a thousand pages of the parent's memory."""


def join_threads() -> None:
    """Wait for all threads but daemons, as Python does when it exits."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Call what was registered with `atexit`, last first, and forget it."""
    atexit._run_exitfuncs()


def forget_parent() -> None:
    """In a forked process: forget the exit functions and the children of its parent.

    These stay: `multiprocessing` ends children that will be started, and torch's data loaders are notified of the exit.
    """
    atexit._clear()
    finalize: Any = weakref.finalize
    _forgotten.append(finalize._registry)
    finalize._registry = {}
    finalize._registered_with_atexit = False
    finalize(finalize, int)  # registers those of the rank now: they run after what it registers, such as `Fabric.close`
    atexit.register(close_files)
    atexit.register(vars(multiprocessing.util)["_exit_function"])
    of_loaders = sys.modules.get("torch.utils.data._utils")
    if of_loaders is not None:
        require("torch", TESTED_TORCH, OF_LOADERS)
        atexit.register(vars(of_loaders)["_set_python_exit_flag"])
    vars(multiprocessing.process)["_children"].clear()
    vars(multiprocessing.util)["_run_after_forkers"]()


def open_files(objects: Iterable[Any]) -> list[Any]:
    """The files, log handlers and temporary folders among the objects.

    Python's only list of open files is that of its garbage collector: 20 ms for the objects of torch, and 200 ms in a
    fork, which copies the memory of each object that it looks at.
    """
    return [each for each in objects if issubclass(type(each), BUFFERED + TEMPORARY)]


def flush(files: Iterable[Any]) -> None:
    """Flush the files, the standard streams and those of C."""
    for each in (sys.stdout, sys.stderr, *files):  # in a notebook, the streams may be objects of any class
        with contextlib.suppress(Exception):  # closed, full, no file, or an error of a log handler: raised on close
            each.flush()
    ctypes.CDLL(None).fflush(None)


def disown(files: list[Any]) -> None:
    """In a forked process: nothing that its parent had open is written, run or deleted, unless this process asks for
    it."""
    gc.freeze()  # looking at an object copies its memory: `close_files` looks at later ones
    _inherited[:] = files
    forget_parent()
    for each in files:
        if isinstance(each, TEMPORARY):
            each.delete = False


def close_files() -> None:
    """Flush open files, and delete temporary ones, at the end of a process in which destructors do not run."""
    files = [*_inherited, *open_files(gc.get_objects())]
    flush(files)
    for each in files:
        if isinstance(each, TEMPORARY):
            with contextlib.suppress(OSError, AttributeError):  # a folder is deleted by its finalizer
                each.close()
    gc.freeze()  # Python's last collection would look at every object of every module, for memory that goes anyway
