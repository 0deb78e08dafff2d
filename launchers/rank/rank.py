"""The life of a process that fabric started as a rank: set up, run, report to the supervisor, and exit.

# Note [One supervisor per process]
A process becomes a rank once, and has one supervisor until it ends. Their state belongs to the process and not to
an object, because the user's script, which has no access to either, runs in between.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

from fabric.launchers.environments.torchelastic import OWNER, variables_of
from fabric.launchers.process.interpreter import close_files, join_threads, run_exit_functions
from fabric.launchers.process.network import interface_for
from fabric.launchers.process.os_process import die_with_parent, num_cores
from fabric.launchers.process.reports import Reporter, Saving
from fabric.launchers.rank.settings import has_own_num_threads
from fabric.launchers.world import World

NUM_REPEATS = 10
"""How often a report is begun again where a signal handler raises: once for each loader whose workers die."""

_supervisors: list[Reporter] = []  # Note [One supervisor per process]


def own_supervisor() -> Reporter | None:
    """The link to the supervisor that started this process as a rank; None in any other process, and in its forks."""
    return _supervisors[-1] if _supervisors and _supervisors[-1].is_own else None


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Context in which this rank saves: a job that gets SIGTERM lets it finish."""
    supervisor = own_supervisor()
    if supervisor is not None:
        supervisor.send(Saving(is_over=False))
    try:
        yield
    finally:
        if supervisor is not None:
            supervisor.send(Saving(is_over=True))


def become_rank(world: World, report_fd: int, parent: int) -> Reporter:
    """Set this process up as a rank: own session, own environment, uncaught exceptions reported to the supervisor."""
    with contextlib.suppress(PermissionError):  # it is a session leader already
        os.setsid()
    die_with_parent(parent)
    os.environ.update({**rank_environ(world, dict(os.environ)), OWNER: str(os.getpid())})
    _share_cores(os.environ["OMP_NUM_THREADS"])
    _write_whole_lines()
    reporter = Reporter(world.rank, report_fd)
    _supervisors.append(reporter)
    # Registered first and so run last, while connections are still open.
    atexit.register(_tell_the_end, reporter, vars(sys).get("last_value"))
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not reporter.is_own:
            before(kind, error, trace)
            return
        reporter.failure(error.with_traceback(trace))
        if before is not sys.__excepthook__:  # the user's own; Python's would print what the supervisor will print
            before(kind, error, trace)

    sys.excepthook = report
    return reporter


def _write_whole_lines() -> None:
    """Write each line as soon as it ends, and not in parts, as with PYTHONUNBUFFERED: ranks share a terminal, a file or
    a pipe, and would mix parts of lines."""
    with contextlib.suppress(Exception):  # a stream of the user's, or none
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def _tell_the_end(reporter: Reporter, before: BaseException | None) -> None:
    """Report the exception that ended the interpreter, unless a hook has, or that the program ended without one."""
    if reporter.has_told_the_end:
        return
    error: BaseException | None = vars(sys).get("last_value")
    if error is not None and error is not before:
        reporter.failure(error)
    else:
        reporter.leaving()


def rank_environ(world: World, environ: dict[str, str]) -> dict[str, str]:
    """The variables that a rank has beyond those of its supervisor."""
    variables = variables_of(world, environ, num_cores())
    if "GLOO_SOCKET_IFNAME" not in environ:
        interface = interface_for(world)
        if interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def run_and_end(reporter: Reporter, everyone: bool, worker: Callable[..., Any], world: World, *args: Any) -> NoReturn:
    """Run the function as this rank, report its result, and end the process.

    `everyone`: every rank of this node reports its result, not only the first.
    """

    def report() -> None:
        result = worker(world, *args)
        reporter.result(result if everyone or world.local_rank == 0 else None)

    run_to_the_end(reporter, report)


def run_to_the_end(reporter: Reporter, program: Callable[[], Any]) -> NoReturn:
    """Run the program, and end this process with the exit code that Python would give it.

    The interpreter's own shutdown is skipped. It takes 350-500 ms (15-26 ms without it), and the destructors of a
    process group whose peers are gone hang or abort in it. Threads are joined, and functions registered with `atexit`
    run.
    """
    code = 1
    try:
        # A signal handler may raise in each step, and in what tells the end; as at any exit of Python, the rest runs.
        with contextlib.suppress(BaseException):
            code = _run(reporter, program)
        for step in (join_threads, run_exit_functions, close_files):
            with contextlib.suppress(BaseException):
                step()
    finally:
        os._exit(code)


def _run(reporter: Reporter, program: Callable[[], Any]) -> int:
    """The exit code of the program, once the supervisor knows how it ended."""
    try:
        program()
    except SystemExit as error:
        code = _exit_code(error)
        if code != 0:
            sys.last_value = error  # as after any other exception, `Fabric.close` then waits for no other rank
        reporter.leaving()
        return code
    except BaseException as error:
        sys.last_value = error
        for _ in range(NUM_REPEATS):  # Note [Signal handlers that raise]
            try:
                reporter.failure(error)
                break
            except BaseException:
                continue
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    reporter.leaving()
    return 0


def _exit_code(leaving: SystemExit) -> int:
    """The exit code that Python gives a `SystemExit`; a message goes to stderr, as Python does."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _share_cores(value: str) -> None:
    """If torch is loaded already, it has read an earlier value of OMP_NUM_THREADS. A number that the program set stays.

    It is set in any case: after a fork, the first thread that does so makes torch's pool anew, and if that is left to
    the threads of autograd, two of them do it at once and abort (`Invalid thread pool!`, ATen/ParallelOpenMP.cpp).

    `value`: the variable, which may list one number for each level of nesting. OpenMP ignores what is no number.
    """
    torch, shared = sys.modules.get("torch"), value.partition(",")[0].strip()
    if torch is not None and has_own_num_threads():
        torch.set_num_threads(torch.get_num_threads())
    elif torch is not None and shared.isdecimal() and int(shared) > 0:
        torch.set_num_threads(int(shared))
