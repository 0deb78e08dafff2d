"""The private names of Python that are needed to end and to fork a process, checked at import.

None has a public counterpart: Python offers no way to end a process with an exit code after its exit functions but
before its destructors, nor to forget exit functions in a forked process. `multiprocessing` uses the same names.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import multiprocessing.util
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any

from fabric.launchers.private_names import Names, require

NAMES: Names = {
    "atexit": {
        "_clear": "a forked rank forgets its parent's exit functions",
        "_run_exitfuncs": "a rank ends with its exit functions and without destructors",
    },
    "threading": {"_shutdown": "a rank joins its threads before it runs its exit functions"},
    "threading:Thread": {"_target": "tells the threads of a notebook from others"},
    "weakref:finalize": {
        "_registry": "a forked rank disowns its parent's finalizers",
        "_exitfunc": "finalizers run at the end of a rank",
    },
    "tempfile": {"_TemporaryFileWrapper": "temporary files that are open before a fork are found by their class"},
    "tempfile:_TemporaryFileWrapper": {"_closer": "a forked rank deletes no temporary file of its parent"},
    "multiprocessing.process": {"_children": "a forked rank forgets its parent's children"},
    "multiprocessing.util": {
        "_exit_function": "ends the children of a rank",
        "_run_after_forkers": "connections to a `Manager` are reopened",
    },
}
OF_LOADERS: Names = {"torch.utils.data._utils": {"_set_python_exit_flag": "tells data loaders that the process ends"}}

require("Python", "3.10 to 3.13", NAMES)

TemporaryFile: type = vars(tempfile)["_TemporaryFileWrapper"]
"""The class of objects that `tempfile.NamedTemporaryFile` returns."""


def join_threads() -> None:
    """Wait for all threads but daemons, as Python does when it exits."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Call what was registered with `atexit`, last first, and forget it."""
    atexit._run_exitfuncs()


def finalizers() -> list[weakref.finalize[Any, Any]]:
    """The finalizers of objects that are alive."""
    return list(vars(weakref.finalize)["_registry"])


def begin_anew(last: Callable[[], None]) -> None:
    """In a forked process: forget the exit functions and children of its parent, except those that every process has.

    These stay: logging flushes its handlers, finalizers of objects created from now on run, `multiprocessing` ends
    children that will be started, and torch's data loaders are notified of the exit. `last` runs after all of them.
    """
    atexit._clear()
    atexit.register(last)
    atexit.register(logging.shutdown)
    of_loaders = sys.modules.get("torch.utils.data._utils")
    if of_loaders is not None:
        require("torch", "2.9 to 2.13", OF_LOADERS)
        atexit.register(vars(of_loaders)["_set_python_exit_flag"])
    atexit.register(vars(weakref.finalize)["_exitfunc"].__get__(None, weakref.finalize))
    atexit.register(vars(multiprocessing.util)["_exit_function"])
    vars(multiprocessing.process)["_children"].clear()
    vars(multiprocessing.util)["_run_after_forkers"]()  # connections to a `Manager` are reopened
