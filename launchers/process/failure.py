"""The error message of a failed launch: one line per other rank, then the rank that failed first with its traceback."""

import json
import signal
import socket
from collections.abc import Sequence

from fabric.launchers.launcher import WorkerError
from fabric.launchers.process.pickling import loads_exception
from fabric.launchers.process.reports import Failure

REASONS = {
    signal.SIGKILL: "somebody's `kill -9`, or the kernel when memory ran out",
    signal.SIGSEGV: "segmentation fault; its stack is on stderr",
    signal.SIGABRT: "it aborted itself; its stack is on stderr. gloo aborts if ranks make different calls: `fabric run "
    "--sanitize always` compares them before",
    signal.SIGBUS: "bus error: often a full /dev/shm",
}

RECENT_NS = 1_500_000_000
"""A rank that ended longer than this before a failure is not its cause. Not measured: peers notice within milliseconds
unless they compute."""


def death(rank: int, at_ns: int, code: int, *, without_result: bool) -> Failure:
    """The failure of a rank that ended with `code` (negative: a signal's number) without a report."""
    if code < 0:
        reason = REASONS.get(signal.Signals(-code))
        summary = f"killed by {signal.Signals(-code).name}" + (f" ({reason})" if reason else "")
    else:
        summary = f"left with exit code {code}" + (" before its function returned" if without_result else "")
    return Failure(
        rank=rank,
        at_ns=at_ns,
        summary=summary,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
    )


def departure(rank: int, at_ns: int, how: str) -> Failure:
    """The end of a rank without an error, as a failure: other ranks were still communicating with it."""
    return Failure(rank=rank, at_ns=at_ns, summary=f"{how} while other ranks still communicated with it", exit_code=0)


def first(failures: Sequence[Failure], left: Sequence[Failure] = ()) -> Failure:
    """The cause: the earliest failure that does not merely report the loss of another rank.

    `left`: ranks that ended without an error. If all failures are collectives that lost a peer, the cause is the rank
    that ended last before them.
    """
    earliest = min(failures, key=lambda failure: (failure.lost_peer, failure.at_ns))
    if not left or not earliest.lost_peer:
        return earliest
    # A rank that ended long before is not the cause; one that ended a moment after may have been noticed late.
    recent = departed_recently(failures, left)
    return min(recent, key=_at) if recent else max(left, key=_at)


def departed_recently(failures: Sequence[Failure], left: Sequence[Failure]) -> list[Failure]:
    """The ranks whose end may have caused the first of these failures."""
    return [departed for departed in left if departed.at_ns > min(map(_at, failures)) - RECENT_NS]


def to_other_nodes(root: Failure) -> str:
    """The failure in words, for the supervisors of other nodes. No pickle: anyone may write to the store."""
    told = {name: getattr(root, name) for name in ("rank", "summary", "traceback", "where", "exit_code", "signal")}
    return json.dumps({**told, "host": socket.gethostname()})


def of_another_node(words: str, at_ns: int) -> Failure:
    """The failure that `to_other_nodes` put into words on another node. `at_ns`: on the clock of this node."""
    return Failure(**json.loads(words), at_ns=at_ns)


def describe(failures: Sequence[Failure], size: int, left: Sequence[Failure] = (), *, num_nodes: int = 1) -> str:
    """The message for the failures of one launch. `left`: ranks that ended without an error."""
    root = first(failures, left)
    lines = []
    for other in sorted(failures, key=_at):
        if other is not root:
            apart_ms = (other.at_ns - root.at_ns) / 1e6
            when = f"{abs(apart_ms):.0f} ms {'later' if apart_ms >= 0 else 'earlier'}"
            where = f", {other.where}" if other.where else ""
            lines.append(f"rank {other.rank} of {size}, {when}{where}: {_one_line(other.summary)}")
    summary = _one_line(root.summary) if root.traceback else root.summary
    what = f"failed first{root.host and f', on {root.host}'}"
    if root.lost_peer and num_nodes > 1:
        what = "noticed first, and no node tells which rank was lost"
    lines.append(f"rank {root.rank} of {size} {what}: {summary}")
    if root.traceback:
        lines += ["", root.traceback]
    return "\n".join(lines)


def _at(failure: Failure) -> int:
    return failure.at_ns


def worker_error(root: Failure, message: str) -> WorkerError:
    """The exception that `launch(function)` raises for the failures of one launch, with its cause."""
    return WorkerError(
        message,
        rank=root.rank,
        exit_code=root.exit_code,
        signal=root.signal,
        cause=loads_exception(root.exception),  # None where only the rank can unpickle it: the message remains
    )


def _one_line(summary: str) -> str:
    line, *more = summary.splitlines() or [""]
    return line[:200] + (" ..." if more or len(line) > 200 else "")
