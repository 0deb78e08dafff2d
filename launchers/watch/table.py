"""The table that is printed for a hang: which ranks wait, in which call, for how long, and what others do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fabric.launchers.watch.activity import CALLS, GRADIENTS, WORLD, Activity, Call

MOST_COMPARED = 16
"""How many of the calls in which ranks wait are compared with each other."""


def who_waits(activities: Sequence[Activity]) -> str:
    """One line for all ranks with the same activity, with the longest duration among them."""
    waiting = [each for each in activities if each.kind == "collective"]
    longest = max((each.seconds or 0.0 for each in waiting), default=0.0)
    verb = "waits" if len(waiting) == 1 else "wait"
    title = f"{len(waiting)} of {len(activities)} ranks {verb} in a collective, for up to {in_words(longest)}."
    groups: dict[tuple[str, str, str], list[Activity]] = {}
    for each in activities:
        groups.setdefault((each.kind, each.words, each.where), []).append(each)
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


def have_diverged(activities: Sequence[Activity]) -> bool:
    """Whether a pending call never returns, because the ranks did not make the same calls.

    Backends match the calls of a process group by their number. So a call is lost that is another operation, or has
    other tensors, on another rank. Calls of several groups are made in the order of the program. So they are lost, too,
    if one rank is ahead of another in one group, and behind it in another group.
    """
    made: dict[tuple[str, int], set[str]] = {}
    pending = set()
    for call in (call for each in activities for call in each.calls):
        if not call.operation.startswith(("send", "recv")):  # recorded on NCCL, and not matched by their number
            made.setdefault((call.group, call.number), set()).add(_compared(call.operation))
            if call.pending:
                pending.add((call.group, call.number))
    return any(len(made[each]) > 1 for each in pending) or _have_crossed(activities)


def wait_for_ended(activities: Sequence[Activity]) -> bool:
    """Whether a rank has ended, and others wait in a collective of all ranks. gloo raises there, and NCCL does not."""
    pending = any(call.pending and _is_of_all(call.group) for each in activities for call in each.calls)
    return pending and any(each.kind == "ended" for each in activities)


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
    return f"{each.words}, {each.where}" if each.where else each.words


def _how_long(alike: Sequence[Activity]) -> str:
    known = [each.seconds for each in alike if each.seconds is not None]
    if not known:
        return ""
    if alike[0].kind == "collective":
        return in_words(max(known))
    return f"last collective {in_words(max(known))} ago"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [min(max(len(row[column]) for row in rows), 90) for column in range(2)]
    return [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]


def _advice(activities: Sequence[Activity]) -> list[str]:
    """The conclusion, if there is a certain one."""
    busy = [each.rank for each in activities if each.kind in ("python", "loader")]
    gone = [each.rank for each in activities if each.kind in ("silent", "ended")]
    if gone:
        return [f"The others wait for {ranks_in_words(gone)}."]
    if busy:
        return [f"The others wait for {ranks_in_words(busy)}, which may be slow, or in another part of the program."]
    if have_diverged(activities):
        return ["Ranks made different calls, and wait for each other forever."]
    return []


def _difference(group: str, activities: Sequence[Activity]) -> list[str]:
    answering = [each for each in activities if each.kind not in ("silent", "ended")]
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
            return [
                f"In the process group {group} the ranks diverge at call {number}:",
                *alike,
                *_side_by_side(number, made),
            ]
    return []


def _side_by_side(number: int, made: dict[int, Call | None]) -> list[str]:
    speakers: dict[str, list[int]] = {}
    for rank, call in made.items():
        speakers.setdefault(_said(call), []).append(rank)
    return [f"  call {number}, {ranks_in_words(ranks)}: {text}" for text, ranks in speakers.items()]


def _compared(operation: str) -> str:
    """The part of an operation that is the same on all ranks, for all backends. NCCL gathers tensors of any size."""
    name = operation.partition(" ")[0]
    return operation if name in ("all_reduce", "broadcast") else name


def _have_crossed(activities: Sequence[Activity]) -> bool:
    """Whether two ranks wait in calls of two groups of all ranks, of which neither has made the other's."""
    recorded = {each.rank: [call for call in each.calls if call.in_order] for each in activities}
    groups = [{call.group for call in calls} for calls in recorded.values()]
    of_all = {name for name in set.union(*groups) if _is_of_all(name)} | set.intersection(*groups)
    waiting = {}
    for each in activities:
        pending = next((call for call in recorded[each.rank] if call.pending and call.group in of_all), None)
        if each.kind == "collective" and pending is not None:
            waiting[pending.group, pending.number] = recorded[each.rank]
    return any(
        one[0] != other[0] and _lacks(waiting[one], other, waiting[other]) and _lacks(waiting[other], one, waiting[one])
        for one, other in itertools.combinations(list(waiting)[:MOST_COMPARED], 2)
    )


def _is_of_all(group: str) -> bool:
    """Whether all ranks are in this process group."""
    return any(word in group for word in (WORLD, GRADIENTS, CALLS))


def _lacks(calls: Sequence[Call], wanted: tuple[str, int], others: Sequence[Call]) -> bool:
    """Whether a rank with these `calls` has certainly not made the call that another rank waits in."""
    group, number = wanted
    made = [call.number for call in calls if call.group == group]
    if made:
        return number > made[-1]
    # None of that group is recorded. So it has made none since any call that both have recorded.
    known = {(call.group, call.number) for call in calls}
    before = itertools.takewhile(lambda call: (call.group, call.number) != wanted, others)
    return any((call.group, call.number) in known for call in before)


def _said(call: Call | None) -> str:
    if call is None:
        return "has not made it"
    return f"{call.operation}, {call.where}" if call.where else call.operation
