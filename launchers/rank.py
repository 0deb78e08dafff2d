"""What a process does once it is a rank of ours: take its place, run, tell the supervisor how it went, and end.

# Note [One supervisor per process]
A process is started once, by one supervisor, and keeps that link until it ends. So the link is the one thing here
that belongs to the process and not to an object: it is set when the process becomes a rank, and never changes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from fabric.launchers.environments.ours import variables_of
from fabric.launchers.inherit import num_cores
from fabric.launchers.kernel import die_with_parent
from fabric.launchers.network import interface_for
from fabric.launchers.report import Reporter
from fabric.launchers.world import World

_link: list[Reporter] = []  # Note [One supervisor per process]


def reporter() -> Reporter | None:
    """The link to the supervisor that started this process, or None where nobody of ours did."""
    return _link[0] if _link and _link[0].is_own else None


def become_rank(world: World, report_fd: int, parent: int) -> Reporter:
    """Take the place of a rank: own session, own environment, a supervisor that hears of every uncaught exception."""
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    die_with_parent(parent)
    os.environ.update(rank_environ(world, dict(os.environ)))
    _share_cores(int(os.environ["OMP_NUM_THREADS"]))
    link = Reporter(world.rank, report_fd)
    _link[:] = [link]
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not link.is_own:
            before(kind, error, trace)
            return
        link.failure(error.with_traceback(trace))
        if before is not sys.__excepthook__:  # the user's own; Python's would print what the supervisor will print
            before(kind, error, trace)

    sys.excepthook = report
    return link


def rank_environ(world: World, environ: dict[str, str]) -> dict[str, str]:
    """The variables that a rank has beyond those of its supervisor."""
    variables = variables_of(world, environ, num_cores())
    if "GLOO_SOCKET_IFNAME" not in environ:
        interface = interface_for(world)
        if interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def run_and_end(link: Reporter, everyone: bool, worker: Callable[..., Any], world: World, *args: Any) -> NoReturn:
    """Run the function as this rank, report, and end the process. `everyone`: all results travel, not only the first.

    The process ends without the interpreter's own shutdown, which takes 350-500 ms and can hang in the destructors of a
    process group whose peers are gone (15-26 ms without it). What the user registered with `atexit` runs.
    """
    code = 1
    try:
        result = worker(world, *args)
        link.result(result if everyone or world.local_rank == 0 else None)
        code = 0
    except SystemExit as leaving:
        code = exit_code(leaving)
    except BaseException as error:
        link.failure(error)
    finally:
        try:
            atexit._run_exitfuncs()
        finally:
            end(code)


def end(code: int) -> NoReturn:
    """End the process now, its output written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def exit_code(leaving: SystemExit) -> int:
    """The exit code that Python gives a `SystemExit`; a message goes to stderr, as Python does."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _share_cores(num_threads: int) -> None:
    """Where torch is loaded already it has read OMP_NUM_THREADS, before it was ours."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(num_threads)
