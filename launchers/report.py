"""What a rank tells its supervisor, by value, over one pipe: a result, or a failure with the user's own traceback.

Each report is a frame: one byte, eight bytes of length, a pickle. When a rank dies of a signal, Python's fault handler
writes the stack into the same pipe as plain text; it starts with `Fatal` and is the last thing that comes.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import struct
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

HEADER = struct.Struct("!cQ")
FRAME = b"\0"

PACKAGE = str(Path(__file__).parent)
FABRIC = str(Path(__file__).parent.parent / "fabric")

LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Read error",
    "recvValue failed",
    "failed to recv",
    "NCCL communicator was aborted",
    "remote process exited",
    "Horovod has been shut down",
    "Timed out",
    "timed out",
    "Wait timeout",
    "did not arrive",
)
"""Words in which torch.distributed, gloo, NCCL and Horovod say that another rank went away: a symptom, no cause."""


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
    """The user's frames, ours removed; or the stack at the moment of a fatal signal."""
    exception: bytes | None = None
    """The exception, where it survives a round trip through pickle."""
    lost_peer: bool = False
    """Whether it only says that another rank went away."""
    exit_code: int | None = None
    signal: int | None = None


class Reporter:
    """A rank's end of the pipe."""

    def __init__(self, rank: int, fd: int) -> None:
        self.rank, self._fd, self._pid = rank, fd, os.getpid()
        if not faulthandler.is_enabled():  # somebody who wants the stack elsewhere has said so already
            faulthandler.enable(fd, all_threads=False)

    @property
    def is_own(self) -> bool:
        """False in a process that the rank forked: a data-loader worker does not speak for the rank."""
        return os.getpid() == self._pid

    def result(self, value: Any) -> None:
        """Send what the function returned. Raises TypeError where it cannot travel."""
        try:
            pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(
                f"Rank {self.rank} returned a `{type(value).__qualname__}`, which cannot be pickled and so not be "
                f"brought home: {error} Return tensors, numbers, and objects of classes at module level."
            ) from error
        self._send(Result(pickled=pickled))

    def failure(self, error: BaseException) -> None:
        """Send an exception that nobody caught."""
        self._send(
            Failure(
                rank=self.rank,
                at_ns=time.monotonic_ns(),
                summary="".join(traceback.format_exception_only(type(error), error)).strip(),
                traceback=users_traceback(error),
                exception=_pickled(error),
                lost_peer=_is_lost_peer(error),
                exit_code=1,
            )
        )

    def _send(self, report: Result | Failure) -> None:
        body = pickle.dumps(report, protocol=pickle.HIGHEST_PROTOCOL)
        view = memoryview(HEADER.pack(FRAME, len(body)) + body)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except BrokenPipeError:  # nobody listens any more: the supervisor is gone, and so are we in a moment
            return


class Inbox:
    """The supervisor's end of the pipe: bytes in, reports out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        self._bytes += data

    def reports(self) -> Iterator[Result | Failure]:
        """Every report that is complete, once."""
        while len(self._bytes) >= HEADER.size and self._bytes.startswith(FRAME):
            end = HEADER.size + HEADER.unpack_from(self._bytes)[1]
            if len(self._bytes) < end:
                return
            report = pickle.loads(memoryview(self._bytes)[HEADER.size : end])
            del self._bytes[:end]
            yield report

    @property
    def fatal_stack(self) -> str:
        """The fault handler's words, where there are any, without our frames and the list of loaded libraries."""
        if not self._bytes.startswith(b"Fatal"):
            return ""
        lines = self._bytes.decode(errors="replace").splitlines()
        noise = (f'  File "{PACKAGE}', f'  File "{FABRIC}', "Extension modules: ")
        return "\n".join(line for line in lines if not line.startswith(noise)).strip()


def users_traceback(error: BaseException) -> str:
    """The traceback as the user would see it had the function been called without us: our frames above it are gone."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).strip()


def _is_ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name.startswith((PACKAGE, FABRIC, "<frozen runpy>")) or name.endswith("/runpy.py")


def _is_lost_peer(error: BaseException | None) -> bool:
    seen: set[int] = set()  # `raise error.__cause__ from error` makes a chain that has no end
    while error is not None and id(error) not in seen:
        if isinstance(error, (RuntimeError, OSError)) and any(words in str(error) for words in LOST_PEER):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, tried in both directions: many exceptions pickle and then cannot be made again."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled
