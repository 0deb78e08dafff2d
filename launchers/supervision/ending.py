"""How the launching process ends after its ranks: with a result, an exception, an exit code or a signal."""

import os
import pickle
import signal
import sys
from typing import Any, NoReturn

from fabric.launchers.process.failure import describe, first, worker_error
from fabric.launchers.process.interpreter import close_files, run_exit_functions
from fabric.launchers.supervision.supervisor import Supervisor


def results(supervisor: Supervisor) -> list[Any]:
    """Return the results of this node's ranks, in order. Raises WorkerError, or what a received signal raises."""
    number = supervisor.ended_by
    if number is not None:
        os.kill(os.getpid(), number)  # the handlers are back: Ctrl-C becomes a KeyboardInterrupt here
    if supervisor.failures:
        size, num_nodes = supervisor.topology.size, supervisor.topology.num_nodes
        raise worker_error(supervisor.failures, size, supervisor.departures, num_nodes=num_nodes)
    return [pickle.loads(pickled) for _, pickled in sorted(supervisor.results.items())]


def leave(supervisor: Supervisor) -> NoReturn:
    """End this process as its ranks ended: the first failure on stderr, and its exit code (128 + n for signal n)."""
    number = supervisor.ended_by
    if number is not None:
        _die_of(number)
    if not supervisor.failures:
        raise SystemExit(0)
    root = first(supervisor.failures, supervisor.departures)
    size, num_nodes = supervisor.topology.size, supervisor.topology.num_nodes
    report = describe(supervisor.failures, size, supervisor.departures, num_nodes=num_nodes)
    above = "\n" if sys.stderr.isatty() else ""  # the line of a progress bar
    print(f"{above}{report}", file=sys.stderr, flush=True)
    raise SystemExit(128 + root.signal if root.signal is not None else root.exit_code or 1)


def _die_of(number: int) -> None:
    """Send this process the signal that the ranks died of, so that a shell sees it."""
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
        run_exit_functions()
        close_files()
        signal.signal(number, signal.SIG_DFL)  # the traceback of a KeyboardInterrupt would show frames of fabric
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)  # the user's handler kept this process alive
