"""Sums of a few numbers over the ranks of one machine, through shared memory.

Where ranks agree before each step, all of them wait for the answer. By a message of gloo that adds 2.4 ms to a step of
3.5 ms (two ranks on two cores), and here 0.1 ms. Each rank writes its numbers, and reads those of the others until all
of them belong to this sum. There are two places for them: a rank that writes to the same one again has seen that every
rank has begun the sum between, so that all have read this one.

# Note [Late ranks]
Nothing here notices that a rank has ended, or waits somewhere else. So a rank that has waited for `_PATIENCE_SECONDS`
asks that the collective computes this sum: its calls are recorded, time out, and fail if a rank has ended. Whoever
finds the numbers complete from then on waits for the decision. One that found them complete just before has read what
is in memory. So the rank that asked looks again after `_GRACE_SECONDS`, in which a write becomes visible: if the
numbers are complete, the sum is computed here, otherwise by the collective, and that holds for all ranks. A lock is
held meanwhile, which the kernel releases if its holder ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import TypeAlias, final
from weakref import WeakKeyDictionary, finalize

from fabric.strategies.collectives.collective import Collective

StartFloatSum: TypeAlias = Callable[[float, int], Callable[[], tuple[float, bool]]]

MOST_NUMBERS = 4
_PATIENCE_SECONDS = 1.0
_GRACE_SECONDS = 0.05
_YIELD_SECONDS = 50e-6
"""A sleep takes longer than most waits, so a rank yields first."""
_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 20e-6, 1e-3

_BITS = 40
"""Of a number in memory. The other 24 bits of the word tell to which sum it belongs: a word is written at once."""
_OFFSET, _NUM_TAGS = 2 ** (_BITS - 1), 2 ** (64 - _BITS) - 2  # an even number: sums alternate between two places
_NUMBERS = Struct(f"{MOST_NUMBERS}Q")  # zeroed, which is no number of a sum, and each written by one store
_FLOAT, _HALVES, _LOW_HALF = Struct("=d"), Struct("=II"), 2**32 - 1


_MADE: WeakKeyDictionary[Collective, _SharedSums | None] = WeakKeyDictionary()
"""What a program made for a collective, once for all of its loaders."""


def shared_sums(collective: Collective) -> Callable[[Sequence[int]], Sequence[float]] | None:
    """A function that gives every rank the sums of all ranks' numbers; None unless all ranks run on this machine.

    It takes at most `MOST_NUMBERS` numbers, each at least -2**39 and below 2**39.
    Ranks: all call it, and all call the function. The first time costs a broadcast and an all-reduce of one number.
    """
    sums = _of(collective)
    if sums is None:
        return None

    def add(numbers: Sequence[int]) -> Sequence[float]:
        found = sums.add(numbers)
        return collective.start_add_numbers(numbers)() if found is None else found

    return add


def shared_float_sum(collective: Collective) -> StartFloatSum | None:
    """As `shared_sums`, for one number of any size, in two steps: the function returns another one, which waits.

    That returns the sum, and whether the ranks passed the same integer, in [0, 2**32), which tells the calls apart. If
    they did not, it tells so to one rank at least.
    Ranks: as `shared_sums`; and all call the second function once before they call the first one again, or none does.
    """
    sums = _of(collective)
    return None if sums is None else partial(_start_float_sum, collective, sums)


def _start_float_sum(
    collective: Collective, sums: _SharedSums, number: float, place: int
) -> Callable[[], tuple[float, bool]]:
    if sums.unread is not None:  # the backward that it was for has raised
        _finish_float_sum(collective, sums, *sums.unread)
    low, high = _HALVES.unpack(_FLOAT.pack(number))
    sums.begin(low, high, place)
    sums.unread = number, place
    return partial(_finish_float_sum, collective, sums, number, place)


def _finish_float_sum(collective: Collective, sums: _SharedSums, number: float, place: int) -> tuple[float, bool]:
    words = sums.end()
    sums.unread = None
    if words is None:
        total, places = collective.start_add_numbers([number, place])()
        return total, places == collective.size * place
    total, is_same = 0.0, True
    for first in range(0, len(words), MOST_NUMBERS):
        low, high, other = words[first : first + 3]
        total += _FLOAT.unpack(_HALVES.pack(low & _LOW_HALF, high & _LOW_HALF))[0]
        is_same &= other & _LOW_HALF == place
    return total, is_same


def _of(collective: Collective) -> _SharedSums | None:
    if collective not in _MADE:
        _MADE[collective] = _make(collective)
    return _MADE[collective]


def _make(collective: Collective) -> _SharedSums | None:
    if collective.size == 1:
        return None
    made = _create(collective.size) if collective.rank == 0 else None
    place = collective.broadcast_object(None if made is None else made[1])
    if place is None:
        return None
    handle = _find(*place) if made is None else made[0]
    sums = None if handle is None else _SharedSums(handle, collective.rank, collective.size)
    (num_found,) = collective.start_add_numbers([sums is not None])()
    return sums if sums is not None and num_found == collective.size and sums.has_processes else None


def _create(num_ranks: int) -> tuple[int, tuple[int, int, str]] | None:
    """New memory without a path, so that nothing is left if ranks are killed; None if there is none on this system.

    Returns its descriptor, and where other processes find it: the arguments of `_find`.
    """
    try:
        handle = os.memfd_create(f"fabric-{secrets.token_hex(16)}")
        os.posix_fallocate(handle, 0, 8 * _num_words(num_ranks))
        return handle, (os.getpid(), handle, _name_of(os.getpid(), handle))
    except (AttributeError, OSError):
        return None


def _find(pid: int, handle: int, name: str) -> int | None:
    """A descriptor of another process' memory; None if that runs on another machine, or its files are closed to us."""
    try:
        return os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR) if _name_of(pid, handle) == name else None
    except OSError:
        return None


def _name_of(pid: int, handle: int) -> str:
    return os.readlink(f"/proc/{pid}/fd/{handle}")


def _num_words(num_ranks: int) -> int:
    return num_ranks + 3 + 2 * num_ranks * MOST_NUMBERS


@final
class _SharedSums:
    """See `shared_sums`. The memory: for each rank the number of its process; the sum that a rank has asked to compute
    by the collective; two decisions; twice the numbers of each rank."""

    def __init__(self, handle: int, rank: int, size: int) -> None:
        """`handle`: is closed with this object."""
        self._handle, self._rank, self._size = handle, rank, size
        finalize(self, os.close, handle)
        self._memory = mmap.mmap(handle, 0)
        self._words = memoryview(self._memory).cast("Q")
        self._of_all = Struct(f"{size * MOST_NUMBERS}Q")
        self._asked, self._decisions = size, (size + 1, size + 2)
        self._numbers = (size + 3, size + 3 + size * MOST_NUMBERS)
        self._tag = 0
        self.unread: tuple[float, int] | None = None
        """What this rank passed for a sum whose result was not asked for yet."""
        self._words[rank] = os.getpid()

    @property
    def has_processes(self) -> bool:
        """Whether each rank is a process of its own: locks do not exclude threads of one."""
        return len(set(self._words[: self._size].tolist())) == self._size

    def add(self, numbers: Sequence[int]) -> list[int] | None:
        """The sums; None if the collective computes them. Its speed: see Note [Cold Python] in `process_group.py`."""
        self.begin(*numbers)
        found = self.end()
        if found is None:
            return None
        zeros = self._size * ((self._tag << _BITS) + _OFFSET)
        return [sum(found[number::MOST_NUMBERS]) - zeros for number in range(len(numbers))]

    def begin(self, first: int, second: int = 0, third: int = 0, fourth: int = 0) -> None:
        """Write this rank's numbers. `end` follows before the next `begin`."""
        self._tag = tag = self._tag % _NUM_TAGS + 1
        zero = (tag << _BITS) + _OFFSET
        place = 8 * (self._numbers[tag % 2] + self._rank * MOST_NUMBERS)
        _NUMBERS.pack_into(self._memory, place, zero + first, zero + second, zero + third, zero + fourth)

    def end(self) -> Sequence[int] | None:
        """Wait for the other ranks. Returns the words of all, in rank order; None if the collective adds numbers."""
        tag = self._tag
        found = self._found(tag) or self._awaited(tag)
        if found is None or (self._words[self._asked] == tag and not self._is_here(tag)):
            return None
        return found

    def _awaited(self, tag: int) -> Sequence[int] | None:
        """Wait for all ranks to come to this sum, and return their words; None if the collective computes it."""
        begun = time.monotonic()
        while (found := self._found(tag)) is None:
            waited = time.monotonic() - begun
            if waited > _PATIENCE_SECONDS:
                self._decide(tag)
                return self._found(tag)
            if waited < _YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(max(waited / 8, _SLEEP_SECONDS), _LONGEST_SLEEP_SECONDS))
        return found

    def _found(self, tag: int) -> Sequence[int] | None:
        """The words of all ranks; None unless all of them have come to this sum."""
        found: Sequence[int] = self._of_all.unpack_from(self._memory, 8 * self._numbers[tag % 2])
        return found if min(found) >> _BITS == tag == max(found) >> _BITS else None

    def _is_here(self, tag: int) -> bool:
        """Whether a sum, for which a rank has asked that, is computed here. Waits for the decision."""
        while self._words[self._decisions[tag % 2]] >> 1 != tag:
            self._decide(tag)
        return bool(self._words[self._decisions[tag % 2]] & 1)

    def _decide(self, tag: int) -> None:
        """See Note [Late ranks]."""
        import fcntl  # Windows has none, and no shared memory here

        fcntl.lockf(self._handle, fcntl.LOCK_EX)
        try:
            if self._words[self._decisions[tag % 2]] >> 1 != tag:
                self._words[self._asked] = tag
                time.sleep(_GRACE_SECONDS)
                self._words[self._decisions[tag % 2]] = tag << 1 | (self._found(tag) is not None)
        finally:
            fcntl.lockf(self._handle, fcntl.LOCK_UN)
