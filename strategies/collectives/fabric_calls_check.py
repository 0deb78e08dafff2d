"""Ranks compare their calls before they communicate.

Ranks whose calls differ would otherwise exchange garbage, hang, or (gloo, on sizes that differ) abort. So each call of
`nested.py`, and each call on an object, starts with the same message, whatever its data: an all-reduce of one float64
number on the CPU. Knows strings, numbers, bytes, and a collective of tensors; knows no containers.
"""

import ctypes
import hashlib
import inspect
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fabric.launchers.process.stack import END, FORWARD, frames_of, users_line
from fabric.strategies.collectives.collective import CollectiveError

if TYPE_CHECKING:
    from fabric.strategies.collectives.collective import Collective

_SHOWN = 10  # lines of a call in an error message
_this_thread = threading.local()

# Note [One number compares all calls]
# It is a 32-bit hash of the rank's call. Sums of hashes are exact in float64 up to 2**21 ranks. A rank whose call
# equals all others gets W times its own hash; if calls differ, this happens with probability 2**-32.
#
# Why one number, and not some bytes of every rank: gloo's ring sends as many segments as there are elements, up to W.
# An all-reduce with 2, 4, 8 and 16 ranks on 2 cores, median in us: of 1 element 68, 741, 1814, 3649; of 4 elements 115,
# 1961, 3644, 6077; of 16 elements 109, 4486, 14774, 15508.


def check_call(collective: "Collective", call: str, *, advice: str = "") -> None:
    """Raise on every rank unless all ranks make the same call.

    `call`: a line that names the operation, then a line for each of its operands. `advice`: the last sentence of the
    error, if all ranks called this operation.
    Ranks: all. Cost: one `all_reduce` of a number; none in a collective of one. Later calls work after an error.
    Raises: CollectiveError on every rank: the calls differ; the message has each rank's call, and the line of the
    program that made it.
    """
    if not all_equal(collective, call):
        raise difference(collective, call, advice)


def check_call_later(collective: "Collective", call: str, *, advice: str = "") -> None:
    """`check_call` for data on an accelerator: no rank waits for the message. The next call that the ranks compare
    raises the error, on every rank; the error names the line of this call."""
    if collective.size == 1:
        return
    mine, frames = hash_of(call), frames_of(inspect.currentframe())

    def judge(hashes: float) -> None:
        if hashes != mine * collective.size:
            raise difference(collective, call, advice, frames)

    collective.add_number_later(mine, judge)


def all_equal(collective: "Collective", words: str) -> bool:
    """Whether all ranks passed the same string. Ranks: all. Cost: one `all_reduce` of a number; none if alone."""
    mine = hash_of(words)
    return collective.size == 1 or collective.add_number(mine) == mine * collective.size


def difference(
    collective: "Collective", call: str, advice: str = "", frames: Sequence[tuple[str, int, str]] | None = None
) -> CollectiveError:
    """The error for ranks whose hashes differ. Ranks: all, each with its own call, and the frames that made it."""
    line = ", ".join(filter(None, [users_line(frames or frames_of(inspect.currentframe())), collective.progress()]))
    _this_thread.is_comparing = True
    try:
        everyones = all_gather_bytes(collective, f"{line}\n{call}".encode())
    finally:
        _this_thread.is_comparing = False
    gathered = [content.decode().split("\n", 1) for content in everyones]
    calls, lines = [call for _, call in gathered], [line for line, _ in gathered]
    ended = [rank for rank, line in enumerate(lines) if line.startswith(END)]
    lost = ended if len(ended) < len(lines) else ()
    return CollectiveError(_side_by_side(calls, lines, advice), rank=collective.rank, lost=lost)


def is_comparing() -> bool:
    """Whether this thread is gathering the calls of all ranks for an error. Those collectives are not compared."""
    return getattr(_this_thread, "is_comparing", False)


def is_in_a_started_thread() -> bool:
    """Whether a `threading.Thread` makes the call. Such calls are not compared: ranks may begin at different calls of
    the thread. In threads of C++, autograd makes the calls of the loop's backward."""
    return frames_of(inspect.currentframe())[-1][2] == "_bootstrap"


def all_gather_bytes(collective: "Collective", mine: bytes) -> list[bytes]:
    """Return the bytes of all ranks, in rank order. Each is sent padded to the greatest length."""
    lengths = collective.all_gather(torch.tensor(len(mine), device="cpu")).tolist()
    rows = collective.all_gather(to_tensor(bytearray(mine.ljust(max(lengths), b"\0"))))
    return [to_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def to_tensor(content: bytearray) -> Tensor:
    """The bytes as a tensor of uint8 that shares their memory."""
    return torch.frombuffer(content or bytearray(1), dtype=torch.uint8)[: len(content)]


def to_bytes(tensor: Tensor) -> bytes:
    """A copy of a contiguous tensor of uint8. By address, because numpy may not be installed."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


@lru_cache(maxsize=1024)
def hash_of(words: str) -> int:
    """32 bits that distinguish `words` from others, see Note [One number compares all calls]."""
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little")


def _side_by_side(calls: list[str], lines: list[str], advice: str) -> str:
    """Each rank's call and its line of the program, without the operands that are equal on all ranks; ranks with equal
    calls from the same line share a paragraph."""
    operands = [call.splitlines()[1:] for call in calls]
    common = set.intersection(*map(set, operands))
    if set().union(*operands) == common:  # the same ones on all ranks, in another order
        common = {first for first, *others in zip(*operands, strict=False) if others.count(first) == len(others)}
    speakers: dict[tuple[str, str], list[int]] = {}
    for rank, call_and_line in enumerate(zip(calls, lines, strict=True)):
        speakers.setdefault(call_and_line, []).append(rank)
    shown = [f"The {len(calls)} ranks did not make the same call:"]
    for (call, line), ranks in speakers.items():
        operation, *things = call.splitlines()
        differing = [thing for thing in things if thing not in common]
        line = line.removeprefix(f"fabric.{operation.partition(' ')[0]}, ")
        said = f"{line} ({operation})" if line.startswith(("fabric.", FORWARD)) else f"{operation}, at {line}"
        shown.append(f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {said}")
        shown.extend(f"      {thing}" for thing in differing[:_SHOWN])
        if len(differing) > _SHOWN:
            shown.append(f"      and {len(differing) - _SHOWN} more that not all ranks have")
        if len(things) > len(differing):
            shown.append(f"      and {len(things) - len(differing)} as on all ranks")
    shown.append(
        "No rank has a result. Make all ranks call the same operation, in the same order, on equal shapes and dtypes."
    )
    if advice and len({call.splitlines()[0] for call in calls}) == 1:
        shown.append(advice)
    return "\n".join(shown)
