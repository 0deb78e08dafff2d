"""Supervises the ranks of this node: receives their reports, forwards signals, and ends all ranks if one fails.

Waits on descriptors, without polling: the exit of each rank, its reports, and signals to this process. Does not depend
on how ranks were started or what they run. Afterwards the launching process ends with a result or an exception
(`results_of`), or with an exit code or a signal (`leave_with`).
"""

import contextlib
import os
import pickle
import selectors
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from fabric.launchers.launcher import Topology
from fabric.launchers.process import failure
from fabric.launchers.process.interpreter import close_files, run_exit_functions
from fabric.launchers.process.os_process import kill_group, signal_rank
from fabric.launchers.process.reports import Failure, Leaving, Result, Saving, read_reports
from fabric.launchers.rendezvous.store_server import MeetingPoint
from fabric.launchers.supervision.guardian import Guardian
from fabric.launchers.supervision.output import Output, Stream
from fabric.launchers.watch.questions import Place, ask_all
from fabric.launchers.watch.table import WAITED_FOR
from fabric.launchers.world import World

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a job."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are forwarded to the ranks, such as SLURM's warning before a time limit."""


class Signals:
    """Between `install` and `restore` signals are recorded in `received`, and not handled.

    A signal that was ignored (`nohup`) stays ignored. Python delivers signals to the main thread alone: nothing is
    recorded where another thread launches.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.wake_fd, self._writer = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._writer, False)
        self._before: dict[int, Any] = {}
        self._before_fd: int | None = None

    def install(self) -> None:
        """Record signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._before_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in ENDING + PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda number, frame: self.received.append(number))

    def restore(self) -> None:
        """Restore handlers and wake-up descriptor. A second call does nothing."""
        if self.wake_fd < 0:
            return
        for number, handler in self._before.items():
            # None: installed by C code, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._before_fd is not None:
            signal.set_wakeup_fd(self._before_fd)
        os.close(self.wake_fd)
        os.close(self._writer)
        self.wake_fd = -1

    def drain(self) -> None:
        """Empty the wake-up pipe, which has what was recorded already."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake_fd, 4096):
                pass


REPORT_SECONDS = 0.1
"""How long other ranks may report their errors after a first failure. A peer's report takes 1-10 ms."""
CAUSE_SECONDS = 1.5
"""How long to wait for the end of a lost peer after a failure that only reports its loss: an interpreter that ends with
`sys.exit(3)` closes its connections 350-500 ms before it has exited."""
TERMINATE_SECONDS = 1.0
"""How long ranks have after SIGTERM, if another rank failed."""
GRACE_SECONDS = 30.0
"""How long ranks have after a signal to this process that ends the job, unless `stop_grace_seconds` says otherwise. A
save that is in progress then is waited for."""
AFTER_SAVE_SECONDS = 5.0
"""How long a rank has after that save, to end its loop or to begin the next save."""
ASK_NODES_SECONDS = 1.0
"""How often each of several nodes looks whether a rank of another one has failed: one request to the store."""
AFTER_DEATH_SECONDS = 10.0
"""How long the other ranks have if a rank dies after such a signal: their collectives with the dead rank never end."""
HANGS_SECONDS = 5.0
"""A job that is ended prints the table of waiting ranks if a collective has waited for that long."""
TABLE_SECONDS = 4.0
"""How long a rank may take to create that table: it asks all others, and waits 1.5 s for stopped ones."""
NUM_ASKED = 3
"""How many ranks are asked for it, one after the other, in case the first ones are stopped."""
PATIENCE_SECONDS = 2.0
"""How long after such a signal a message says which ranks are waited for."""


@dataclass(slots=True, kw_only=True)
class Child:
    """A rank's process, as seen by its supervisor."""

    rank: int
    pid: int
    exit_fd: int
    """Readable once the rank has ended."""
    report_fd: int
    reap: Callable[[], int] | None = None
    """Returns its exit code, or minus the signal that killed it. Called once, after the rank has ended. None: a child
    of this process."""
    received: bytearray = field(default_factory=bytearray)
    """What was read of its reports, and is not complete yet."""
    num_saves: int = 0
    """How many saves are in progress."""
    leaving: Leaving | None = None
    """Sent by a rank whose program has finished."""
    watcher: Place | None = None
    """The address of the rank's watcher."""


class Supervisor:
    """Context manager around the ranks of one launch. No rank outlives it, whatever happens inside."""

    def __init__(self, topology: Topology, launcher: str, *, expects_results: bool) -> None:
        self.topology, self.launcher, self.expects_results = topology, launcher, expects_results
        self.results: dict[int, bytes] = {}
        self.failures: list[Failure] = []
        self.departures: list[Failure] = []
        """Ranks that ended without an error. They are the cause if another rank was still communicating with them."""
        self.signals = Signals()
        self._running: dict[int, Child] = {}
        self._deadlines: list[tuple[float, Callable[[], None]]] = []
        self._stopping = False
        """Set once ranks were signalled to end: how a rank ends from then on is no failure of the rank."""
        self._last_save = float("-inf")
        """When a rank last began or ended a save."""
        self._abandoned = False
        self._last_words = ""
        """The last text that a rank has sent to be printed: of a hang, the table that names the late ranks."""
        self._num_handled = 0
        """How many of the received signals have been handled."""

    def __enter__(self) -> "Supervisor":
        self._output = Output(self.topology)
        self._point = MeetingPoint(self.topology)
        self._guardian = Guardian()
        self._selector = selectors.DefaultSelector()
        self.signals.install()
        self._selector.register(self.signals.wake_fd, selectors.EVENT_READ, self._handle_signals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._abandoned:
            return
        self._kill()
        while self._running:
            self._poll()
        if self.failures and self.ended_by is None:
            self._output.note_failure(self.describe())
        if self.ended_by is not None and self.topology.log_dir is not None:
            number = signal.Signals(self.ended_by)
            say(f"Ended by {number.name}: how each rank ended is in `{self.topology.log_dir}/rank-*.log`.")
        self._point.close(failed=error is not None or bool(self.failures))
        self._guardian.close()
        self._selector.close()
        self._output.close()
        self.signals.restore()

    def describe(self) -> str:
        """The message for the failures."""
        size, num_nodes = self.topology.size, self.topology.num_nodes
        described = failure.describe(self.failures, size, self.departures, num_nodes=num_nodes)
        if failure.first(self.failures, self.departures).lost_peer:
            late = (line for line in self._last_words.splitlines() if line.startswith(WAITED_FOR))
            return "\n\n".join([described, *late])
        return described

    def abandon(self) -> None:
        """In a rank that was forked from this process: release everything that belongs to the supervisor."""
        self._abandoned = True
        self.signals.restore()
        self._guardian.abandon()
        self._selector.close()
        self._output.abandon()
        self._point.abandon()
        for child in self._running.values():
            os.close(child.report_fd)
            os.close(child.exit_fd)

    @contextlib.contextmanager
    def starting(self, local_rank: int) -> Iterator[World]:
        """Context in which the process of a rank is started: the world of the rank at `local_rank` of this node."""
        world = self.topology.world(local_rank, port=self._point.port, launcher=self.launcher)
        with self._output.of(world):
            yield world

    def add(self, child: Child) -> None:
        """Supervise a rank that was just started."""
        self._guardian.watch(child.pid)
        os.set_blocking(child.report_fd, False)
        self._running[child.rank] = child
        self._selector.register(child.report_fd, selectors.EVENT_READ, partial(self._read_reports, child))
        self._selector.register(child.exit_fd, selectors.EVENT_READ, partial(self._on_exit, child))
        for stream in self._output.streams(child.rank):
            self._selector.register(stream.reader, selectors.EVENT_READ, partial(self._copy, stream))

    def wait(self) -> None:
        """Return once every rank has ended, and the results, failures and ended ranks are known."""
        self._point.open()
        self._handle_signals()
        if self.topology.num_nodes > 1:
            self._after(ASK_NODES_SECONDS, self._ask_nodes)
        while self._running:
            self._poll()
        if self.topology.num_nodes > 1 and self.failures:
            self._agree_on_the_first()

    def _ignore(self, fd: int) -> None:
        """Watch a descriptor no longer. A second call does nothing."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    @property
    def ended_by(self) -> int | None:
        """The signal to this process that ended the ranks, if they did not fail by themselves."""
        if not self.signals.received or not self.failures:
            return None
        root = failure.first(self.failures, self.departures)
        return next((one for one in self.signals.received if one in ENDING or root.signal == one), None)

    def _poll(self) -> None:
        """Wait for the next event, and handle it."""
        timeout = max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None
        for key, _ in self._selector.select(timeout):
            # An event before it in the same batch may have closed the descriptor, or reused its number.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            self._deadlines.pop(0)[1]()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._deadlines.append((time.monotonic() + seconds, action))
        self._deadlines.sort(key=lambda deadline: deadline[0])

    def _read_reports(self, child: Child) -> None:
        """Read what a rank has written; at end of file stop watching the pipe."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(child.report_fd, 1 << 20):
                child.received += data
            self._ignore(child.report_fd)
        for report in read_reports(child.received):
            match report:
                case Result():
                    self.results[child.rank] = report.pickled
                case Saving():
                    child.num_saves += -1 if report.is_over else 1
                    self._last_save = time.monotonic()
                case Leaving():
                    child.leaving = report
                case Place():
                    child.watcher = report
                case Failure():
                    self._fail(report)
                case _:
                    self._last_words = str(report)
                    say(self._last_words)

    def _copy(self, stream: Stream) -> None:
        """Copy what a rank has printed; at end of file stop watching the pipe."""
        if not stream.copy():
            self._ignore(stream.reader)

    def _on_exit(self, child: Child) -> None:
        """Handle the end of a rank: read its last reports, end the processes it left, and take its exit code."""
        at_ns = time.monotonic_ns()
        self._read_reports(child)
        streams = self._output.streams(child.rank)
        for fd in (child.report_fd, child.exit_fd, *(stream.reader for stream in streams)):
            self._ignore(fd)
        kill_group(child.pid, signal.SIGKILL)  # before it is reaped: then its number may be reused
        code = child.reap() if child.reap else os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self._guardian.forget(child.pid)
        os.close(child.report_fd)
        os.close(child.exit_fd)
        self._output.end(child.rank)
        del self._running[child.rank]
        if code < 0 and self.signals.received and -code not in self.signals.received:
            self._point.end_waits()  # the others are saving, perhaps with this rank
            self._after(AFTER_DEATH_SECONDS, self._kill)
        without_result = self.expects_results and child.rank not in self.results
        if code == 0 and not without_result:
            self.departures.append(self._departure(child, at_ns, "left with exit code 0"))
            if self.failures and not self._stopping:
                self._after(REPORT_SECONDS, self._terminate)
        else:
            death = failure.death(child.rank, at_ns, code, without_result=without_result)
            self._fail(death, by_itself=child.leaving is not None and code > 0)

    def _departure(self, child: Child, at_ns: int, how: str) -> Failure:
        how = "its function returned" if child.rank in self.results else how
        if child.leaving is not None:
            at_ns, how = child.leaving.at_ns, f"{how} {child.leaving.progress}".rstrip()
        return failure.departure(child.rank, at_ns, how)

    def _fail(self, report: Failure, *, by_itself: bool = False) -> None:
        """Record a failure. The first failure ends the other ranks. `by_itself`: the rank was ending already."""
        is_ended = self._stopping and not self.signals.received and not by_itself
        if is_ended or any(known.rank == report.rank for known in self.failures):
            return
        self.failures.append(report)
        self._output.note(report.rank, report.traceback or report.summary)
        if self.topology.num_nodes > 1 and not report.lost_peer and not report.host:
            self._point.first_failure(failure.to_other_nodes(report))  # before other nodes lose the rank, or soon after
        if not self._stopping:
            is_lost = all(known.lost_peer for known in self.failures)
            lacks_cause = is_lost and not failure.departed_recently(self.failures, self.departures)
            self._after(CAUSE_SECONDS if lacks_cause else REPORT_SECONDS, self._terminate)

    def _terminate(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        failed = [known.rank for known in self.failures]
        for child in self._running.values():
            if child.leaving is not None:  # it would have ended by itself, given more time
                self.departures.append(self._departure(child, child.leaving.at_ns, "came to its end"))
            elif child.rank not in failed:  # a failed rank is ending already, and may be writing its files
                signal_rank(child.pid, signal.SIGTERM)
        self._after(TERMINATE_SECONDS, self._kill)

    def _ask_nodes(self) -> None:
        """End the ranks of this node if a rank of another one has failed; otherwise look again later."""
        words = "" if self._stopping else self._point.first_failure()
        if words:
            self._fail(failure.of_another_node(words, time.monotonic_ns()))
        elif not self._stopping:
            self._after(ASK_NODES_SECONDS, self._ask_nodes)

    def _agree_on_the_first(self) -> None:
        """Tell the other nodes which rank failed first, or learn it. One that only lost a peer is never the cause."""
        root = failure.first(self.failures, self.departures)
        if not root.host:
            own = "" if root.lost_peer else failure.to_other_nodes(root)
            words = self._point.first_failure(own, CAUSE_SECONDS)
            if words not in ("", own):
                self.failures.insert(0, failure.of_another_node(words, root.at_ns))

    def _kill(self) -> None:
        self._stopping = True
        for child in self._running.values():
            kill_group(child.pid, signal.SIGKILL)

    def _handle_signals(self) -> None:
        """Forward received signals. The first that ends the job gives ranks time, the second kills."""
        self.signals.drain()
        for number in self.signals.received[self._num_handled :]:
            self._num_handled += 1
            if number in ENDING and self._stopping:
                self._kill()
                continue
            if number in ENDING:
                self._print_table()  # before ranks are signalled, while each is still at its line
            for child in self._running.values():
                signal_rank(child.pid, number)
            if number in ENDING:
                self._stopping = True
                self._after(PATIENCE_SECONDS, partial(self._announce_grace, number))
                grace = self.topology.stop_grace_seconds
                self._after(GRACE_SECONDS if grace is None else grace, self._end_grace)

    def _end_grace(self) -> None:
        """Kill the ranks that are left; by default only once none is in a save, which all can complete."""
        is_saving = any(child.num_saves for child in self._running.values())
        is_saving = is_saving or time.monotonic() < self._last_save + AFTER_SAVE_SECONDS
        if self.topology.stop_grace_seconds is None and is_saving and not self.failures:
            self._after(AFTER_SAVE_SECONDS, self._end_grace)
        else:
            self._kill()

    def _announce_grace(self, number: int) -> None:
        grace = self.topology.stop_grace_seconds
        seconds = f"{GRACE_SECONDS:g} s to end, and longer for a save" if grace is None else f"{grace:g} s to end"
        say(
            f"Got {signal.Signals(number).name}: rank {', '.join(map(str, sorted(self._running)))} may take up to "
            f"{seconds}. Send it again to end them now."
        )

    def _print_table(self) -> None:
        """Print the table of waiting ranks; nothing if no rank waits. One rank that answers creates it for all."""
        watchers = [child.watcher for child in self._running.values() if child.watcher is not None]
        for watcher in watchers[:NUM_ASKED]:
            words = ask_all([watcher], f"table {HANGS_SECONDS}", TABLE_SECONDS)[watcher.rank]
            if isinstance(words, bytes):
                if words.strip():
                    say(words.decode())
                return


def supervise(
    topology: Topology, launcher: str, start: Callable[[World], Child], *, expects_results: bool, max_restarts: int = 0
) -> Supervisor:
    """Start the ranks of this node, each by `start`, and return their supervisor once all have ended.

    After a failure all start again, up to `max_restarts` times, unless this process was signalled to end.
    """
    while True:
        with Supervisor(topology, launcher, expects_results=expects_results) as supervisor:
            for local_rank in range(topology.num_processes):
                with supervisor.starting(local_rank) as world:
                    supervisor.add(start(world))
            supervisor.wait()
        if not supervisor.failures or supervisor.ended_by is not None or topology.attempt == max_restarts:
            return supervisor
        topology = replace(topology, attempt=topology.attempt + 1)
        say(f"{supervisor.describe()}\n\nAll ranks start again: restart {topology.attempt} of {max_restarts}.")


def say(words: str) -> None:
    """Print to stderr; on a terminal below the line of a progress bar, and wrapped at words."""
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            fill = partial(textwrap.fill, width=width, subsequent_indent=" " * 6, break_long_words=False)
            words = "\n".join(["", *(fill(line, break_on_hyphens=False) for line in words.splitlines())])
        print(words, file=sys.stderr, flush=True)


def results_of(supervisor: Supervisor) -> list[Any]:
    """Return the results of this node's ranks, in order. Raises WorkerError, or what a received signal raises."""
    number = supervisor.ended_by
    if number is not None:
        os.kill(os.getpid(), number)  # the handlers are back: Ctrl-C becomes a KeyboardInterrupt here
    if supervisor.failures:
        raise failure.worker_error(failure.first(supervisor.failures, supervisor.departures), supervisor.describe())
    return [pickle.loads(pickled) for _, pickled in sorted(supervisor.results.items())]


def leave_with(supervisor: Supervisor) -> NoReturn:
    """End this process as its ranks ended: the first failure on stderr, and its exit code (128 + n for signal n)."""
    number = supervisor.ended_by
    if number is not None:
        _die_of(number)
    if not supervisor.failures:
        raise SystemExit(0)
    root = failure.first(supervisor.failures, supervisor.departures)
    above = "\n" if sys.stderr.isatty() else ""  # the line of a progress bar
    print(f"{above}{supervisor.describe()}", file=sys.stderr, flush=True)
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
