"""How the launching process ends after its ranks: with a result, an exception, an exit code or a signal."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, TypeAlias, final

from fabric.launchers.launcher import WorkerError
from fabric.launchers.process.interpreter import close_files, run_exit_functions
from fabric.launchers.process.program import is_interactive
from fabric.launchers.supervision.failure import describe, first, worker_error
from fabric.launchers.supervision.supervisor import Supervisor

Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def results(supervisor: Supervisor) -> list[Any]:
    """Return the results of this node's ranks, in order. Raises WorkerError, or what a received signal raises."""
    number = supervisor.ended_by
    if number is not None:
        os.kill(os.getpid(), number)  # the handlers are back: Ctrl-C becomes a KeyboardInterrupt here
    if supervisor.failures:
        _exit_as_the_rank()
        raise worker_error(supervisor.failures, supervisor.topology.size, supervisor.departures)
    return [pickle.loads(pickled) for _, pickled in sorted(supervisor.results.items())]


def leave(supervisor: Supervisor) -> NoReturn:
    """End this process as its ranks ended: the first failure on stderr, and its exit code (128 + n for signal n)."""
    atexit.register(_end)
    number = supervisor.ended_by
    if number is not None:
        _die_of(number)
    if not supervisor.failures:
        raise SystemExit(0)
    root = first(supervisor.failures, supervisor.departures)
    print(describe(supervisor.failures, supervisor.topology.size, supervisor.departures), file=sys.stderr, flush=True)
    raise SystemExit(_exit_code(root.signal, root.exit_code))


def _exit_code(signal: int | None, code: int | None) -> int:
    """The exit code for a rank that was killed by `signal` or exited with `code`: never 0."""
    return 128 + signal if signal is not None else code or 1


def _end() -> None:
    """Run the program's exit functions, then flush files and delete temporary ones, since no last collection does."""
    atexit.unregister(_end)
    run_exit_functions()
    close_files()


def _die_of(number: int) -> None:
    """Send this process the signal that the ranks died of, so that a shell sees it."""
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
        _end()
        signal.signal(number, signal.SIG_DFL)  # the traceback of a KeyboardInterrupt would show frames of fabric
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)  # the user's handler kept this process alive


@final
class ExitAsTheRank:
    """A hook in place of `before`, by which an uncaught `WorkerError` ends the process with the exit code of the rank.

    Python ends with 1 after any exception, unless its hook raises `SystemExit`.
    """

    def __init__(self, before: Hook) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, WorkerError) and self.before is sys.__excepthook__:
            print(error, file=sys.stderr, flush=True)
        else:
            self.before(kind, error, trace)
        if isinstance(error, WorkerError):
            raise SystemExit(_exit_code(error.signal, error.exit_code))


def _exit_as_the_rank() -> None:
    """Set the hook; not at a prompt, which goes on."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and not is_interactive() and not isinstance(sys.excepthook, ExitAsTheRank):
        sys.excepthook = ExitAsTheRank(sys.excepthook)


def restore_hook() -> None:
    """In a forked rank: the hook is again the program's, or Python's own."""
    if isinstance(sys.excepthook, ExitAsTheRank):
        sys.excepthook = sys.excepthook.before
