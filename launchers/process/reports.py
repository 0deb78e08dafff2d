"""What a rank reports to its supervisor over a pipe: a result, or a failure with the user's own traceback.

Each report is a frame: eight bytes of length, a pickle. When a rank dies of a signal, Python's fault handler writes the
stacks of its threads to its stderr. Processes that the rank forks, such as data-loader workers, close the pipe.

# Note [Signal handlers that raise]
`DataLoader` raises from its handler of SIGCHLD when a worker dies, at whatever line the main thread has reached. A rank
that is ending needs none of its workers, so the handler is removed before its last reports.
"""

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from fabric.launchers.process import pickling
from fabric.launchers.process.stack import OURS, users_line

HEADER = struct.Struct("!Q")

LOST_PEER = re.compile(r"\[\S*gloo/\S+:\d+\] |Horovod has been shut down")
"""How gloo and Horovod begin the message of a lost peer, for which they raise plain RuntimeErrors."""
LOST_PEER_TYPES = {"DistError", "HorovodInternalError"}
"""What torch.distributed and Horovod raise otherwise, by name: neither is imported here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the function returned on this rank."""

    pickled: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a rank failed."""

    rank: int
    at_ns: int
    """`time.monotonic_ns` of this node, read before the rank's connections were torn down."""
    summary: str
    """One line: `ValueError: boom`, `killed by SIGSEGV`, `left with exit code 3`."""
    traceback: str = ""
    """The user's frames, without those of fabric."""
    where: str = ""
    """The user's line that raised, and how far its loop was: `at train.py:12 in main, after 6 steps`."""
    exception: bytes | None = None
    """The exception; None if it cannot be pickled and unpickled."""
    lost_peer: bool = False
    """Whether the error only reports the loss of another rank."""
    exit_code: int | None = None
    signal: int | None = None
    host: str = ""
    """The rank's machine, if it is another machine than this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A save has begun in this rank, or has ended."""

    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A rank's program has come to its end without an exception; its connections are still open."""

    at_ns: int
    progress: str
    """How far the rank's loop has come: `after 6 steps`."""


class Reporter:
    """A rank's end of the pipe."""

    def __init__(self, rank: int, fd: int) -> None:
        self.rank, self._fd, self._pid = rank, fd, os.getpid()
        self._writes = threading.Lock()
        self.has_told_the_end = False
        """Whether a failure, or the end of the program, was sent."""
        self.progress: Callable[[], str] = lambda: ""
        """How far the loop of this rank is, in words."""
        os.set_inheritable(fd, False)
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(sys.__stderr__)
        os.register_at_fork(after_in_child=self._abandon)

    @property
    def is_own(self) -> bool:
        """False in a process that the rank forked: a data-loader worker does not report for the rank."""
        return os.getpid() == self._pid

    def _abandon(self) -> None:
        """In a process that the rank forked: do not keep the pipe open. A child of the child has none any more."""
        if os.getppid() == self._pid:
            os.close(self._fd)

    def result(self, value: Any) -> None:
        """Send what the function returned. Raises TypeError where it cannot be sent."""
        try:
            pickled = pickling.dumps(value)
        except Exception as error:
            raise TypeError(
                f"Rank {self.rank} returned a `{type(value).__qualname__}`, which cannot be pickled, so the launching "
                f"process cannot get it: {error}. Return tensors, numbers, and objects that `pickle` or `cloudpickle` "
                "takes."
            ) from error
        _forget_workers()
        self.send(Result(pickled=pickled))

    def failure(self, error: BaseException) -> None:
        """Send an uncaught exception; only the first is sent."""
        at_ns = time.monotonic_ns()
        if not self.has_told_the_end:
            _forget_workers()
            self.send(failure_of(self.rank, at_ns, error, self.progress()))
            self.has_told_the_end = True

    def leaving(self) -> None:
        """Send that the program has finished; the rank's connections are about to be closed."""
        self.has_told_the_end = True
        self.send(Leaving(at_ns=time.monotonic_ns(), progress=self.progress()))

    def send(self, report: object) -> None:
        """Send a report, the address of the rank's watcher, or a text that the supervisor prints at once."""
        if not self.is_own:
            return
        body = pickle.dumps(report, protocol=pickle.HIGHEST_PROTOCOL)
        view = memoryview(HEADER.pack(len(body)) + body)
        # The supervisor may be gone, and this process about to be killed. A frame that is longer than the pipe's buffer
        # would be mixed with one of another thread.
        with contextlib.suppress(BrokenPipeError), self._writes:
            while view:
                view = view[os.write(self._fd, view) :]


def _forget_workers() -> None:
    """See Note [Signal handlers that raise]."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def read_reports(received: bytearray) -> Iterator[object]:
    """Take each complete report out of the bytes that a rank has sent."""
    while len(received) >= HEADER.size:
        end = HEADER.size + HEADER.unpack_from(received)[0]
        if len(received) < end:
            return
        report = pickle.loads(memoryview(received)[HEADER.size : end])
        del received[:end]
        yield report


def failure_of(rank: int, at_ns: int, error: BaseException, progress: str) -> Failure:
    """The failure of a rank by an exception. `progress`: how far its loop was."""
    line = users_line(_frames(error))
    return Failure(
        rank=rank,
        at_ns=at_ns,
        summary="".join(traceback.format_exception_only(type(error), error)).strip(),
        traceback=users_traceback(error),
        where=", ".join(filter(None, [line and f"at {line}", progress])),
        exception=pickling.dumps_exception(error),
        lost_peer=_is_lost_peer(error),
        exit_code=1,
    )


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """Where the error was raised, innermost first."""
    stack = traceback.extract_tb(error.__traceback__)
    return [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack)]


def users_traceback(error: BaseException) -> str:
    """The traceback as if the user's function had been called directly: without the frames of fabric above it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).strip()


def _is_ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name.startswith((*OURS, "<frozen runpy>")) or name.endswith("/runpy.py")


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, only reports the loss of another rank. By its type and its
    origin: a user's error may have the same words."""
    seen: set[int] = set()  # `raise error.__cause__ from error` makes a chain that has no end
    while error is not None and id(error) not in seen:
        is_of_backend = not LOST_PEER_TYPES.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        is_late = isinstance(error, TimeoutError) and any(file.startswith(OURS) for file, _, _ in _frames(error)[:1])
        is_symptom = vars(error).get("lost_peer") is True  # a CollectiveError
        is_plain = type(error) is RuntimeError  # whose `str` runs no code of the user's
        if is_of_backend or is_late or is_symptom or (is_plain and LOST_PEER.search(str(error))):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
