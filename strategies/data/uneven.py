"""Ranks whose data has different numbers of batches: all stop at the first end, or go on until the last.

The length of a stream is known only after it was read. So before each batch the ranks all-reduce whether they have
one: two numbers, over a separate process group, so that they are not matched with collectives of the loop. The next
batch is read, and its all-reduce started, before this one is yielded: it overlaps with the step. Every rank must
iterate such a loader, and equally often.

A rank whose data has ended, while others go on, gets its last batch again. `RepeatedBatches` makes it count zero.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

Uneven: TypeAlias = Literal["stop", "error", "repeat"]
"""What all ranks do when the first of them has no batch left: stop, raise an error, or repeat their last batch."""

_END = object()
_NOTHING_OF_ONE = 2**20
_NOTHING = -_NOTHING_OF_ONE
"""The vote of a rank that has no batch to repeat: negative in sum, whatever the others vote."""


@final
class Agreed:
    """One iteration over the batches of this rank, for as many steps as the ranks agree on."""

    def __init__(self, supply: _Supply, steps: Callable[[Agreed], Iterator[Any]]) -> None:
        self._supply = supply
        self.factors: deque[float] = deque()
        """For each batch that the loop has not received yet: the factor of its loss, see `RepeatedBatches`."""
        self.batches = steps(self)

    @property
    def num_read(self) -> int:
        """Number of batches read, without repeated ones."""
        return self._supply.num_read


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """The collectives by which ranks agree while they iterate. Every rank calls each of them."""

    size: int
    start: Callable[[list[int]], Callable[[], list[int]]]
    """Starts an all-reduce (sum) of numbers below 2**40; returns a function that waits for it and returns the sums."""
    gather: Callable[[list[int]], list[list[int]]]
    """Returns the numbers of all ranks, in rank order, on every rank."""


@final
class Agreement:
    """How the ranks agree on the number of batches of one loader. Each call is for one iteration."""

    def __init__(
        self,
        uneven: Uneven,
        votes: Votes,
        words: str,
        report: Callable[[str], None],
        *,
        ahead: bool,
        trains: bool = True,
    ) -> None:
        """`words`: the loader as errors name it. `ahead`: read the next batch, and start its vote, before yielding.
        `trains`: whether the loop trains on the batches."""
        self._uneven, self._votes, self._words, self._ahead, self._trains = uneven, votes, words, ahead, trains
        self._report = report
        self._iterations = 0
        self.repeats = uneven == "repeat"
        """Whether a rank may get a batch again."""

    def __call__(self, batches: Iterator[Any], example: Callable[[], Any], *, ended: bool = False) -> Agreed:
        """One iteration. `batches`: those of this rank. `ended`: it has read them all before a checkpoint.

        `example`: returns a batch to repeat if `batches` has none, because all were read before a checkpoint; None if
        there is no data at all.
        Raises, while the batches are iterated: RuntimeError: on every rank, if ranks are at different batches, have
        different numbers of batches under `"error"`, or nothing to repeat under `"repeat"`.
        """
        self._iterations += 1
        supply = _Supply(iter(()) if ended else batches, example if self._uneven == "repeat" else None)
        number = self._iterations
        return Agreed(supply, lambda agreed: self._agreed(supply, number, agreed.factors))

    def _agreed(self, supply: _Supply, iteration: int, factors: deque[float]) -> Iterator[Any]:
        step = 0
        batch = supply.draw()
        vote, ask = supply.vote, self._ask(supply, iteration, step)
        while have := self._num_that_have(ask(), supply, iteration, step):
            step += 1
            factors.append(self._votes.size / have if vote == 1 else 0.0)
            if self._ahead:
                current, batch = batch, supply.draw()
                vote, ask = supply.vote, self._ask(supply, iteration, step)
                yield current
                del current
            else:
                yield batch
                batch = supply.draw()
                vote, ask = supply.vote, self._ask(supply, iteration, step)

    def _ask(self, supply: _Supply, iteration: int, step: int) -> Callable[[], list[int]]:
        return self._votes.start([supply.vote, _place(iteration, step)])

    def _num_that_have(self, answer: list[int], supply: _Supply, iteration: int, step: int) -> int:
        """How many ranks have a batch of their own for this step; 0 if no rank takes it."""
        size = self._votes.size
        have, places = answer
        if places != size * _place(iteration, step):
            raise RuntimeError(self._astray(self._votes.gather([iteration, step])))
        if have == size or (have > 0 and self._uneven == "repeat"):
            return have
        if self._uneven == "repeat":
            self._tell_of_repeats([number for (number,) in self._votes.gather([supply.num_read])], step, have)
        elif have > 0:
            self._tell_of_rest([vote == 1 for (vote,) in self._votes.gather([supply.vote])], step)
        return 0

    def _tell_of_repeats(self, read: list[int], step: int, have: int) -> None:
        if have < 0 < have % _NOTHING_OF_ONE:
            raise RuntimeError(
                f"{self._begin()} has no batch for {_ranks([number == 0 for number in read])}, and "
                "nothing to repeat there. Give every rank some data."
            )
        if min(read) < step:
            counts = "counts zero in gradients" if self._trains else "`gather_for_metrics` leaves out"
            self._say_once(
                f"{self._begin()} has different numbers of batches: {_per_rank(read)}. The ranks take {step} steps, "
                f"and those with fewer repeat their last one, which {counts}, because of "
                '`uneven="repeat"`. This is reported once.'
            )

    def _tell_of_rest(self, has_more: list[bool], step: int) -> None:
        found = (
            f"{self._begin()} has different numbers of batches: {_ranks([not more for more in has_more])} had {step}, "
            f"and {_ranks(has_more)} more"
        )
        if not self._trains:
            raise RuntimeError(
                f"{found}. With this strategy a forward waits for all ranks, so each rank must evaluate as many "
                'batches as any other. Pass `setup_dataloaders(..., uneven="repeat")`, with which ranks that have '
                "ended repeat their last batch: `gather_for_metrics` leaves it out, and what the loop counts by itself "
                "must leave it out (`if not loader.iteration.repeats`). Or make the parts equal."
            )
        if self._uneven == "error":
            raise RuntimeError(
                f'{found}, which `uneven="error"` forbids. Make the parts equal, or pass `uneven="stop"` or `"repeat"`.'
            )
        self._say_once(
            f"{found}, which are not used: all ranks stop at the same step. To use all data, pass "
            '`setup_dataloaders(..., uneven="repeat")`, with which ranks that have ended repeat their last batch, and '
            "it counts zero in gradients; or make the parts equal. This is reported once."
        )

    def _say_once(self, sentence: str) -> None:
        self._report(sentence)
        self._report = lambda sentence: None

    def _astray(self, places: list[list[int]]) -> str:
        where = "; ".join(f"rank {rank}: iteration {i}, batch {n}" for rank, (i, n) in enumerate(places))
        return (
            f"{self._begin()} must be iterated by all ranks alike, and they are at different batches ({where}; "
            "iterations count from 1, batches from 0). Let every rank iterate, and leave its loop, at the same step. "
            "To read a batch on one rank, iterate the loader from before `setup_dataloaders`; for a loop on some "
            "ranks, pass `use='validate'`, `'test'` or `'predict'`."
        )

    def _begin(self) -> str:
        return f"The data that each rank reads by `{self._words}`"


@final
class _Supply:
    """One rank's batches of one iteration; at their end the last one again, if `example` is given."""

    def __init__(self, batches: Iterator[Any], example: Callable[[], Any] | None) -> None:
        self._batches, self._example = batches, example
        self._last: Any = None
        self.num_read = 0
        """Number of batches read, without repeated ones."""
        self._ended = False

    def draw(self) -> Any:
        """The next batch; `_END` if there is none."""
        batch = _END if self._ended else next(self._batches, _END)
        if batch is not _END:
            self.num_read += 1
            self._last = batch if self._example is not None else None
            return batch
        if not self._ended and self.num_read == 0 and self._example is not None:
            self._last = self._example()
        self._ended = True
        return _END if self._last is None else self._last

    @property
    def vote(self) -> int:
        """1 for a batch that is not repeated, `_NOTHING` if there is none to repeat, otherwise 0."""
        if self._ended and self._example is not None and self._last is None:
            return _NOTHING
        return int(not self._ended)


def _place(iteration: int, step: int) -> int:
    return zlib.crc32(f"{iteration} {step}".encode())


def _ranks(chosen: list[bool]) -> str:
    ranks = [str(rank) for rank, is_chosen in enumerate(chosen) if is_chosen]
    shown = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _per_rank(numbers: list[int]) -> str:
    shown = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers[:8]))
    return shown + (f", and {len(numbers) - 8} ranks more" if len(numbers) > 8 else "")
