"""Ranks whose data has different numbers of batches: all stop when the first data ends, or go on until the last ends.

The length of a stream is known only after it was read. So for each batch the ranks all-reduce whether they have one,
over a separate process group: the all-reduce is then not matched with collectives of the loop. Where the loop cannot
change what is read, one batch is read ahead, and the all-reduce overlaps with the step before. Every rank must iterate
such a loader, and equally often.

A rank whose data has ended, while others go on, gets its last batch again. `RepeatedBatches` makes that batch count
zero.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, final

from fabric.strategies.data.partition import Uneven

_END = object()
_NOTHING_OF_ONE = 2**20
_NOTHING = -_NOTHING_OF_ONE
"""The vote of a rank that has no batch to repeat: the sum is negative, whatever the other ranks vote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """The collectives by which ranks agree while they iterate. Every rank calls each of them."""

    size: int
    start: Callable[[Sequence[float]], Callable[[], Sequence[float]]]
    """Starts an all-reduce (sum) of numbers of at most 32 bits. Returns a function that waits, and returns the sums."""
    gather: Callable[[list[int]], list[list[int]]]
    """Returns the numbers of all ranks, in rank order, on every rank."""


@final
@dataclass(eq=False)
class Agreement:
    """How the ranks agree on the number of batches of one loader. Each call is for one iteration."""

    uneven: Uneven
    votes: Votes
    words: str
    """The loader as errors name it."""
    report: Callable[[str], None]
    ahead: bool = field(kw_only=True)
    """Whether a batch is read before the loop has asked for it."""
    trains: bool = field(default=True, kw_only=True)
    """Whether the loop trains on the batches."""
    _iterations: int = 0
    _num_given: int = 0
    _awaited: Callable[[], object] = list
    """Waits for the latest all-reduce."""

    @property
    def repeats(self) -> bool:
        """Whether a rank may get a batch again."""
        return self.uneven == "repeat"

    def __call__(
        self, batches: Iterator[Any], example: Callable[[], Any], *, has_ended: bool = False
    ) -> tuple["Supply", Iterator[Any]]:
        """One iteration over the batches of this rank, for as many steps as the ranks agree on.

        `has_ended`: it resumes where this rank's data had ended. `example`: returns the batch to repeat if `batches` is
        empty; None if there is no data at all.
        Raises, while the batches are iterated: RuntimeError: on every rank, if ranks are at different batches, have
        different numbers of batches to evaluate, or nothing to repeat under `"repeat"`.
        """
        self._iterations += 1
        supply = Supply(example if self.repeats else None, has_ended, self.repeats)
        return supply, self._agreed(supply, batches, self._iterations)

    def _agreed(self, supply: "Supply", batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        batch, vote = supply.draw(batches)
        wait = self._ask(vote, iteration, 0)
        for step in count():
            have = wait()
            if not self._is_taken(have, vote, supply, step):
                return
            self._num_given += 1
            supply.factors.append(self.votes.size / have if vote == 1 else 0.0)
            if not self.ahead:
                yield batch
            following, vote = supply.draw(batches)
            wait = self._ask(vote, iteration, step + 1)
            if self.ahead:
                yield batch
            batch = following

    def _ask(self, vote: int, iteration: int, step: int) -> Callable[[], float]:
        """Start to agree on a batch, once the previous agreement has ended. The result waits, and returns how many
        ranks have a batch of their own; it raises if the ranks are at different batches."""
        self._awaited()
        place = [iteration, step, self._num_given]
        mine = zlib.crc32(b"%d %d %d" % (*place,))
        answer = self.votes.start([vote, mine])

        @cache
        def wait() -> float:
            have, places = answer()
            if places != self.votes.size * mine:
                raise RuntimeError(self._astray(self.votes.gather(place)))
            return have

        self._awaited = wait
        return wait

    def _is_taken(self, have: float, vote: int, supply: "Supply", step: int) -> bool:
        """Whether the ranks take this step, for which `have` of them have a batch of their own."""
        if have == self.votes.size or (have > 0 and self.repeats):
            return True
        if self.repeats:
            self._tell_of_repeats([number for (number,) in self.votes.gather([supply.num_read])], step, have)
        elif have > 0:
            self._tell_of_rest([each == 1 for (each,) in self.votes.gather([vote])], step)
        return False

    def _tell_of_repeats(self, read: list[int], step: int, have: float) -> None:
        if have < 0 < have % _NOTHING_OF_ONE:
            raise RuntimeError(
                f"{self._begin()} has no batch for {_ranks([number == 0 for number in read])}, and "
                "nothing to repeat there. Give every rank some data."
            )
        if min(read) < step:
            counts = "counts zero in gradients" if self.trains else "`gather_for_metrics` leaves out"
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
        if not self.trains:
            raise RuntimeError(
                f"{found}. With this strategy a forward waits for all ranks, so each rank must evaluate as many "
                'batches as any other. Pass `setup_dataloaders(..., uneven="repeat")`, with which ranks that have '
                "ended repeat their last batch: `gather_for_metrics` leaves it out, and what the loop counts by itself "
                "must leave it out (`if not loader.iteration.repeats`). Or make the parts equal."
            )
        self._say_once(
            f"{found}, which are not used: all ranks stop at the same step. To use all data, pass "
            '`setup_dataloaders(..., uneven="repeat")`, with which ranks that have ended repeat their last batch, and '
            "it counts zero in gradients; or make the parts equal. This is reported once."
        )

    def _say_once(self, sentence: str) -> None:
        self.report(sentence)
        self.report = lambda sentence: None

    def _astray(self, places: list[list[int]]) -> str:
        where = "; ".join(
            f"rank {rank}: iteration {i}, batch {n}, {m} before it" for rank, (i, n, m) in enumerate(places)
        )
        return (
            f"{self._begin()} must be iterated by all ranks alike, and they are at different batches ({where}; "
            "iterations count from 1, batches from 0, those before it in all iterations). Let every rank iterate, and "
            "leave its loop, at the same step. To read a batch on one rank, iterate the loader from before "
            "`setup_dataloaders`; for a loop on some ranks, pass `use='validate'`, `'test'` or `'predict'`."
        )

    def _begin(self) -> str:
        return f"The data that each rank reads by `{self.words}`"


@final
@dataclass(eq=False)
class Supply:
    """Draws one rank's batches of one iteration; after their end the last batch again, if `example` is given.

    It does not hold the batches: their iterator refers to the position of the loop, which refers to this.
    """

    example: Callable[[], Any] | None
    ended: bool
    """Whether this rank's data was read to its end."""
    repeats: bool
    last: Any = None
    """What is repeated."""
    num_read: int = 0
    """Number of batches read, without repeated ones."""
    factors: deque[float] = field(default_factory=deque)
    """For each batch that the loop has not received yet: the factor of its loss, see `RepeatedBatches`."""

    def draw(self, batches: Iterator[Any]) -> tuple[Any, int]:
        """The next batch, `_END` if there is none; and this rank's vote: 1 for a batch that is not repeated, `_NOTHING`
        if there is none to repeat, otherwise 0."""
        batch = _END if self.ended else next(batches, _END)
        if batch is not _END:
            self.num_read += 1
            self.last = batch if self.repeats else None
            self.example = None  # it refers to the loader, which refers to this
            return batch, 1
        self.ended = True
        if self.last is None and self.example is not None:
            self.last = self.example()
        self.example = None
        if self.last is not None:
            return self.last, 0
        return _END, _NOTHING if self.repeats else 0


def _ranks(chosen: list[bool]) -> str:
    ranks = [str(rank) for rank, is_chosen in enumerate(chosen) if is_chosen]
    shown = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _per_rank(numbers: list[int]) -> str:
    shown = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers[:8]))
    return shown + (f", and {len(numbers) - 8} ranks more" if len(numbers) > 8 else "")
