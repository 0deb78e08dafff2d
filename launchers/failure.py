"""Which rank failed first, in words: the others in a line each, then the one to blame with its own traceback, last."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Sequence

from fabric.launchers.launcher import WorkerError
from fabric.launchers.report import Failure

REASONS = {
    signal.SIGKILL: "somebody's `kill -9`, or the kernel when memory ran out",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "it aborted itself",
    signal.SIGBUS: "bus error: often a full /dev/shm",
}


def death(rank: int, at_ns: int, code: int, stack: str, *, without_result: bool) -> Failure:
    """The failure of a rank that ended with `code` (negative: a signal's number) and reported nothing itself."""
    if code < 0:
        reason = REASONS.get(signal.Signals(-code))
        summary = f"killed by {signal.Signals(-code).name}" + (f" ({reason})" if reason else "")
    else:
        summary = f"left with exit code {code}" + (" before its function returned" if without_result else "")
    return Failure(
        rank=rank,
        at_ns=at_ns,
        summary=summary,
        traceback=stack,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
    )


def first(failures: Sequence[Failure]) -> Failure:
    """The one to blame: the earliest that does not merely say that another rank went away."""
    return min(failures, key=lambda failure: (failure.lost_peer, failure.at_ns))


def describe(failures: Sequence[Failure], size: int, ended: Sequence[int] = ()) -> str:
    """The failures of one launch in words. `ended`: ranks that ended well."""
    root = first(failures)
    lines = []
    for other in sorted(failures, key=lambda failure: failure.at_ns):
        if other is not root:
            apart_ms = (other.at_ns - root.at_ns) / 1e6
            when = f"{abs(apart_ms):.0f} ms {'later' if apart_ms >= 0 else 'earlier'}"
            lines.append(f"rank {other.rank} of {size}, {when}: {_one_line(other.summary)}")
    if root.lost_peer and ended:
        lines += [f"rank {rank} of {size}: left with exit code 0 while others still waited for it" for rank in ended]
    summary = _one_line(root.summary) if root.traceback else root.summary
    lines.append(f"rank {root.rank} of {size} failed first: {summary}")
    if root.traceback:
        lines += ["", root.traceback]
    return "\n".join(lines)


def worker_error(failures: Sequence[Failure], size: int, ended: Sequence[int]) -> WorkerError:
    """The failures of one launch as the exception that `launch(function)` raises; its cause is attached."""
    root = first(failures)
    cause = None
    if root.exception is not None:
        try:
            cause = pickle.loads(root.exception)
        except Exception:  # it could be made again in the rank, but not in here: the words remain
            cause = None
    error = WorkerError(
        describe(failures, size, ended), rank=root.rank, exit_code=root.exit_code, signal=root.signal, cause=cause
    )
    error.__cause__ = cause
    return error


def _one_line(summary: str) -> str:
    line, *more = summary.splitlines() or [""]
    return line[:200] + (" ..." if more or len(line) > 200 else "")
