"""The private names of Python that ending and forking a process need: all of them here, checked when it is imported.

None has a public counterpart: Python offers no way to end a process with an exit code after its exit functions but
before its destructors, nor to forget exit functions in a forked process. `multiprocessing` uses the same names.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import multiprocessing.util
import platform
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

_NEEDED: tuple[tuple[Any, str], ...] = (
    (atexit, "_clear"),
    (atexit, "_run_exitfuncs"),
    (threading, "_shutdown"),
    (weakref.finalize, "_registry"),
    (weakref.finalize, "_exitfunc"),
    (tempfile, "_TemporaryFileWrapper"),
    (multiprocessing.process, "_children"),
    (multiprocessing.util, "_exit_function"),
    (multiprocessing.util, "_run_after_forkers"),
)


def check(needed: Iterable[tuple[Any, str]]) -> None:
    """Raise ImportError where this Python lacks one of the names."""
    missing = [f"`{owner.__name__}.{name}`" for owner, name in needed if name not in vars(owner)]
    if missing:
        raise ImportError(
            f"Python {platform.python_version()} has no {', '.join(missing)}, which torchfabric needs to start and end "
            "processes. Install a newer torchfabric, or run it with Python 3.10 to 3.13."
        )


check(_NEEDED)

TemporaryFile: type = vars(tempfile)["_TemporaryFileWrapper"]
"""What `tempfile.NamedTemporaryFile` gives."""


def join_threads() -> None:
    """Return once all threads have ended but daemons, as Python waits for them when it ends."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Call what was registered with `atexit`, last first, and forget it."""
    atexit._run_exitfuncs()


def finalizers() -> list[weakref.finalize[Any, Any]]:
    """The finalizers whose objects live."""
    return list(vars(weakref.finalize)["_registry"])


def begin_anew(last: Callable[[], None]) -> None:
    """In a forked process: forget exit functions and children, which are its parent's, but for what every process has.

    Those that stay: logging writes out its handlers, finalizers of objects made from now on run, `multiprocessing` ends
    the children that will be started, and torch's data loaders learn that the interpreter ends. `last` runs after all.
    """
    atexit._clear()
    atexit.register(last)
    atexit.register(logging.shutdown)
    of_loaders = sys.modules.get("torch.utils.data._utils")
    if of_loaders is not None:
        check([(of_loaders, "_set_python_exit_flag")])
        atexit.register(vars(of_loaders)["_set_python_exit_flag"])
    atexit.register(vars(weakref.finalize)["_exitfunc"].__get__(None, weakref.finalize))
    atexit.register(vars(multiprocessing.util)["_exit_function"])
    vars(multiprocessing.process)["_children"].clear()
    vars(multiprocessing.util)["_run_after_forkers"]()  # connections to a `Manager` are opened anew
