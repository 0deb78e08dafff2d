"""What each rank is doing at this moment, and the table of it that is printed for a hang: which ranks wait, in which
call, for how long, and what others do. An `Activity` is sent to the rank that prints.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["collective", "loader", "python", "silent", "gone"]

WORLD = "of all ranks"
"""The name of the process group of all ranks."""
GRADIENTS = "gradients"
CALLS = "calls of fabric"
"""Descriptions of further process groups of all ranks, see `process_group.py`."""
ELSEWHERE = "and Python is at "
"""In `Activity.words` if the call goes on in the background."""
WAITED_FOR = "The others wait for "
"""The beginning of the line below the table that names the late ranks."""
GONE = "A collective of all ranks waits for a rank that has ended or cannot be reached, and will never complete."
DIVERGED = "The ranks did not make the same call, and would wait for each other forever."


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective that a rank has started."""

    group: str
    """The name of the process group, the same on all of its ranks."""
    number: int
    """The number of the call within that group, from 1. The backend matches calls by it."""
    operation: str
    """`all_reduce of float32 (20,)`."""
    where: str
    """The user's line: `train.py:12 in main`."""
    started_ns: int
    """`time.time_ns` of the rank's node."""
    timeout_seconds: float = 0.0
    """The timeout of the group; 0: unknown."""
    pending: bool = False
    is_on_device: bool = False
    """Whether an accelerator runs it: its timeout raises nothing in the thread that has made it."""
    device_seconds: float | None = None
    """How long an accelerator was in the call, if it is over and torch has timed it."""

    def seconds(self, now_ns: int) -> float:
        """How long ago it was started."""
        return max(0.0, (now_ns - self.started_ns) / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one rank is doing."""

    rank: int
    kind: Kind
    words: str
    """Describes the activity, without rank, line and time."""
    where: str = ""
    """The user's line that made the collective, or at which the rank's Python is; empty if it is unknown."""
    progress: str = ""
    """How far the rank's loop is: `after 6 steps`."""
    seconds: float | None = None
    """Duration of the collective, or the time since the last one; None: unknown."""
    calls: tuple[Call, ...] = ()
    """The last collectives that are recorded, oldest first."""

    def to_bytes(self) -> bytes:
        """Serialize."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Activity":
        """Deserialize. Raises ValueError, TypeError or KeyError if the bytes are something else."""
        fields: Mapping[str, Any] = json.loads(content)
        return cls(**{**fields, "calls": tuple(Call(**call) for call in fields["calls"])})


def who_waits(activities: Sequence[Activity]) -> str:
    """One line for all ranks with the same activity, with the longest duration among them."""
    waiting = [each for each in activities if each.kind == "collective"]
    longest = max((each.seconds or 0.0 for each in waiting), default=0.0)
    verb = "waits" if len(waiting) == 1 else "wait"
    title = f"{len(waiting)} of {len(activities)} ranks {verb} in a collective, for up to {in_words(longest)}."
    groups: dict[tuple[str, str], list[Activity]] = {}
    for each in activities:
        groups.setdefault((each.kind, _what(each)), []).append(each)
    rows = [
        (ranks_in_words(each.rank for each in alike), _what(alike[0]), _how_long(alike))
        for alike in sorted(groups.values(), key=lambda alike: alike[0].rank)
    ]
    return "\n".join([title, *_columns(rows), *_advice(activities)])


def first_difference(activities: Sequence[Activity]) -> str:
    """Compare the recorded calls of all ranks, from the last call that is the same on all; empty if none differ.

    Each process group is compared by itself; within it calls are matched by their number.
    """
    lines: list[str] = []
    for group in sorted({call.group for each in activities for call in each.calls}):
        lines += _difference(group, activities)
    return "\n".join(lines)


def waiting_calls(activities: Sequence[Activity]) -> dict[int, Call]:
    """The call in which each rank waits, without ranks that run Python meanwhile, or wait in `send` and `recv`, which
    backends match by no number."""
    found = {}
    for each in activities:
        call = next((call for call in each.calls if call.pending), None)
        waits = each.kind == "collective" and ELSEWHERE not in each.words
        if waits and call is not None and not call.operation.startswith(("send", "recv")):
            found[each.rank] = call
    return found


def why_none_continues(activities: Sequence[Activity], before: Mapping[int, Call]) -> str:
    """Why no rank can continue; empty if one may. `before`: the calls in which ranks waited at an earlier table.

    All ranks wait where they waited before, or are gone: have ended, or are on a machine that cannot be reached.
    """
    waiting = waiting_calls(activities)
    gone = [each for each in activities if each.kind == "gone"]
    stay = all(rank in before and _id(before[rank]) == _id(call) for rank, call in waiting.items())
    if not stay or len(waiting) + len(gone) < len(activities):
        return ""
    if gone:
        return GONE if any(_is_of_all(call.group, activities) for call in waiting.values()) else ""
    return DIVERGED if _never_meet(activities) else ""


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' * (len(runs) != 1 or runs[0][0] != runs[0][1])} {shown}"


def in_words(seconds: float) -> str:
    """`31 s`, `5 min 2 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def _what(each: Activity) -> str:
    return _at([each.where, each.progress], each.words)


def _at(place: Sequence[str], words: str) -> str:
    """What a rank does, after the method and the line in which it does it, and its step."""
    known = ", ".join(filter(None, place))
    return f"{known}: {words}" if known else words


def _how_long(alike: Sequence[Activity]) -> str:
    known = [each.seconds for each in alike if each.seconds is not None]
    if not known:
        return ""
    longest = in_words(max(known))
    return longest if alike[0].kind == "collective" else f"last collective {longest} ago"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [min(max(len(row[column]) for row in rows), 90) for column in range(2)]
    return [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]


def _advice(activities: Sequence[Activity]) -> list[str]:
    """The conclusion, if there is a certain one."""
    busy = [each.rank for each in activities if each.kind in ("python", "loader")]
    gone = [each.rank for each in activities if each.kind in ("silent", "gone")]
    if gone:
        return [f"{WAITED_FOR}{ranks_in_words(gone)}."]
    if busy:
        return [f"{WAITED_FOR}{ranks_in_words(busy)}, which may be slow, or in another part of the program."]
    return ["They wait in different calls."] if _never_meet(activities) else []


def _difference(group: str, activities: Sequence[Activity]) -> list[str]:
    answering = [each for each in activities if each.kind not in ("silent", "gone")]
    calls = {each.rank: {call.number: call for call in each.calls if call.group == group} for each in answering}
    if group != WORLD:  # a rank without a call may be outside of it
        calls = {rank: known for rank, known in calls.items() if known}
    start = max(min(known) for known in calls.values() if known)
    end = max(max(known) for known in calls.values() if known)
    for number in range(start, end + 1):
        made = {rank: known.get(number) for rank, known in calls.items()}
        if len({_compared(call.operation) if call is not None else "" for call in made.values()}) > 1:
            before = next((known[number - 1] for known in calls.values() if number - 1 in known), None)
            alike = [f"  call {number - 1}, on all ranks: {_said(before)}"] if before is not None else []
            speakers: dict[str, list[int]] = {}
            for rank, call in made.items():
                speakers.setdefault(_said(call), []).append(rank)
            rows = [f"  call {number}, {ranks_in_words(ranks)}: {text}" for text, ranks in speakers.items()]
            return [f"In the process group {group} the ranks diverge at call {number}:", *alike, *rows]
    return []


def _compared(operation: str) -> str:
    """The part of an operation that is the same on all ranks, for all backends. NCCL gathers tensors of any size."""
    name = operation.partition(" ")[0]
    return operation if name in ("all_reduce", "broadcast") else name


def _never_meet(activities: Sequence[Activity]) -> bool:
    """Whether ranks wait in different calls of groups of all ranks, or in one call with other operations or tensors.

    Backends match the calls of a process group by their number.
    """
    of_all, made = set(), dict[tuple[str, int], set[str]]()
    for call in waiting_calls(activities).values():
        made.setdefault(_id(call), set()).add(_compared(call.operation))
        if _is_of_all(call.group, activities):
            of_all.add(_id(call))
    return len(of_all) > 1 or any(len(operations) > 1 for operations in made.values())


def _id(call: Call) -> tuple[str, int]:
    return call.group, call.number


def _is_of_all(group: str, activities: Sequence[Activity]) -> bool:
    """Whether all ranks are in this process group: by its name, or because each has made a call in it."""
    if any(word in group for word in (WORLD, GRADIENTS, CALLS)):
        return True
    return all(any(call.group == group for call in each.calls) for each in activities)


def _said(call: Call | None) -> str:
    if call is None:
        return "has not made it"
    return _at([call.where], call.operation)
