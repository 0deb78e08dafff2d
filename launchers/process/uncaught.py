"""An uncaught `WorkerError` ends the launching process with the exit code and the message of the rank.

`launch()` without a function ends the same way. Python ends with 1 after any exception, unless its hook raises
`SystemExit`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias, final

from fabric.launchers.launcher import WorkerError
from fabric.launchers.process.program import is_interactive

Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def exit_code(signal: int | None, code: int | None) -> int:
    """The exit code for a rank that was killed by `signal` or exited with `code`: never 0."""
    return 128 + signal if signal is not None else code or 1


@final
class ExitAsTheRank:
    """A hook for uncaught exceptions that replaces `before`, and calls it for all others."""

    def __init__(self, before: Hook) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, WorkerError) and self.before is sys.__excepthook__:
            print(error, file=sys.stderr, flush=True)
        else:
            self.before(kind, error, trace)
        if isinstance(error, WorkerError):
            raise SystemExit(exit_code(error.signal, error.exit_code))


def exit_as_the_rank() -> None:
    """Let an uncaught `WorkerError` end the process with the exit code of its rank; not at a prompt, which goes on."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and not is_interactive() and not isinstance(sys.excepthook, ExitAsTheRank):
        sys.excepthook = ExitAsTheRank(sys.excepthook)


def hook_of_the_program() -> Hook:
    """The hook set by the program, or Python's own."""
    return sys.excepthook.before if isinstance(sys.excepthook, ExitAsTheRank) else sys.excepthook
