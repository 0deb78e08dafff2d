"""Ranks whose data has different numbers of batches: all stop at the first end, or go on until the last.

The length of a stream is known only after it was read. So before each batch the ranks all-reduce whether they have
one, over a separate process group, so that this is not matched with collectives of the loop. Where the loop cannot
change what is read, several batches are read ahead, one for each that is yielded, and one all-reduce is for all of
them: it is started before the last of the previous ones is yielded, and overlaps with that step. Their number doubles
from one to `_AHEAD`, and to `_MOST_AHEAD` if they are small on every rank, which the same all-reduce tells. Otherwise
there is one for each batch. Every rank must iterate such a loader, and equally often.

A rank whose data has ended, while others go on, gets its last batch again. `RepeatedBatches` makes it count zero. A
rank that has a batch takes the step in any case. So if batches are not read ahead, it yields the batch at once, and
waits for the others where the result is used: for the factor of the loss, or before the next all-reduce.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple, final

from fabric.strategies.data.positions import Resumable, Tail
from fabric.strategies.data.repeated import Factor, Later
from fabric.strategies.data.share import Uneven
from fabric.strategies.tensors.nests import is_tensor, map_leaves

_END = object()
_AHEAD, _MOST_AHEAD = 4, 16
"""An all-reduce of a few numbers over gloo takes as much processor time as 10 % of a step of 5 ms."""
_MOST_AHEAD_BYTES = 32 * 2**20
"""More than `_AHEAD` batches are read ahead only if they, and the positions after them, have no more bytes."""
_NOTHING_OF_ONE = 2**20
_NOTHING = -_NOTHING_OF_ONE
"""The vote of a rank that has no batch to repeat: negative in sum, whatever the others vote."""


@final
class Agreed:
    """One iteration over the batches of this rank, for as many steps as the ranks agree on."""

    def __init__(self, supply: _Supply, steps: Callable[[Agreed], Iterator[Any]]) -> None:
        self._supply = supply
        self.factors: deque[Factor] = deque()
        """For each batch that the loop has not received yet: the factor of its loss, see `RepeatedBatches`."""
        self.batches = steps(self)

    @property
    def num_read(self) -> int:
        """Number of batches read, without repeated ones."""
        return self._supply.num_read

    @property
    def has_rest(self) -> bool:
        """Whether this rank has not read its data to the end."""
        return not self._supply.ended

    @property
    def last(self) -> Any:
        """The last batch read, if it may be repeated; else None."""
        return self._supply.last

    @property
    def position(self) -> Any:
        """That of the user's loader after the batch that was yielded last, if others are read ahead; else None."""
        return self._supply.position


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """The collectives by which ranks agree while they iterate. Every rank calls each of them."""

    size: int
    start: Callable[[Sequence[float]], Callable[[], Sequence[float]]]
    """Starts an all-reduce (sum) of numbers of at most 32 bits. Returns a function that waits, and returns the sums."""
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
        """`words`: the loader as errors name it. `ahead`: whether batches are read before the loop has had the previous
        ones. `trains`: whether the loop trains on the batches."""
        self._uneven, self._votes, self._words, self._ahead, self._trains = uneven, votes, words, ahead, trains
        self._report = report
        self._iterations = self._num_given = 0
        self._awaited: Callable[[], object] = list
        """Waits for the latest all-reduce."""
        self.repeats = uneven == "repeat"
        """Whether a rank may get a batch again."""

    def __call__(
        self,
        batches: Iterator[Any],
        example: Callable[[], Any],
        tail: Tail | None = None,
        position: Resumable | None = None,
    ) -> Agreed:
        """One iteration. `batches`: those of this rank. `tail`: of the checkpoint that it resumes from. `position`: the
        loader that reads them, if it saves its own position.

        `example`: returns the batch to repeat if neither `batches` nor `tail` has one; None if there is no data at all.
        Raises, while the batches are iterated: RuntimeError: on every rank, if ranks are at different batches, have
        different numbers of batches under `"error"`, or nothing to repeat under `"repeat"`.
        """
        self._iterations += 1
        supply = _Supply(
            batches,
            example if self._uneven == "repeat" else None,
            tail or Tail(),
            position.state_dict if self._ahead and position is not None else lambda: None,
        )
        number = self._iterations
        return Agreed(supply, lambda agreed: self._agreed(supply, number, agreed.factors))

    def _agreed(self, supply: _Supply, iteration: int, factors: deque[Factor]) -> Iterator[Any]:
        if not self._ahead:
            yield from self._agreed_one_by_one(supply, iteration, factors)
            return
        step, drawn = 0, deque([supply.draw()])
        answer = self._ask(drawn, iteration, step)
        while True:
            following = deque[_Drawn]()
            haves, all_double = answer()
            # Twice as many as last time, so that the first batch is not kept waiting.
            num_more = 2 if all_double else 1
            for have in haves[: len(drawn)]:
                vote = drawn[0].vote
                if not self._is_taken(have, vote, supply, step):
                    return
                step += 1
                self._num_given += 1
                factors.append(self._factor(have, vote))
                following.extend(supply.draw() for _ in range(num_more))
                if len(drawn) == 1:
                    answer = self._ask(following, iteration, step)
                supply.position = drawn[0].position
                yield drawn.popleft().batch
            drawn = following

    def _agreed_one_by_one(self, supply: _Supply, iteration: int, factors: deque[Factor]) -> Iterator[Any]:
        for step in count():
            drawn = supply.draw()
            answer = self._ask([drawn], iteration, step)
            factor: Factor
            # In the first step a rank that has nothing to repeat is an error.
            if step == 0 or drawn.vote != 1 or self._uneven != "repeat":
                (have, *_), _ = answer()
                if not self._is_taken(have, drawn.vote, supply, step):
                    return
                factor = self._factor(have, drawn.vote)
            else:
                factor = Later(partial(self._factor_of, answer))
            self._num_given += 1
            factors.append(factor)
            yield drawn.batch

    def _factor_of(self, answer: Callable[[], _Answer]) -> float:
        (have, *_), _ = answer()
        return self._factor(have, 1)

    def _factor(self, have: float, vote: int) -> float:
        return self._votes.size / have if vote == 1 else 0.0

    def _ask(self, drawn: Collection[_Drawn], iteration: int, step: int) -> Callable[[], _Answer]:
        """Start to agree on these batches, once the previous agreement has ended. The result waits; it raises if the
        ranks are at different batches."""
        self._awaited()
        place = [iteration, step, self._num_given]
        mine = zlib.crc32(b"%d %d %d" % (*place,))
        votes = [each.vote for each in drawn]
        # Always as many numbers: gloo aborts if ranks at different batches send messages of different sizes.
        padding = [0] * (_MOST_AHEAD - len(votes) if self._ahead else 0)
        answer = self._votes.start([*votes, *padding, _may_double(drawn), mine])
        found: _Answer | RuntimeError | None = None

        def wait() -> _Answer:
            nonlocal found
            if found is None:
                *haves, num_doubling, places = answer()
                found = _Answer(haves, num_doubling == self._votes.size)
                if places != self._votes.size * mine:
                    found = RuntimeError(self._astray(self._votes.gather(place)))
            if isinstance(found, RuntimeError):
                raise found
            return found

        self._awaited = wait
        return wait

    def _is_taken(self, have: float, vote: int, supply: _Supply, step: int) -> bool:
        """Whether the ranks take this step, for which `have` of them have a batch of their own."""
        if have == self._votes.size or (have > 0 and self._uneven == "repeat"):
            return True
        if self._uneven == "repeat":
            self._tell_of_repeats([number for (number,) in self._votes.gather([supply.num_read])], step, have)
        elif have > 0:
            self._tell_of_rest([each == 1 for (each,) in self._votes.gather([vote])], step)
        return False

    def _tell_of_repeats(self, read: list[int], step: int, have: float) -> None:
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
        return f"The data that each rank reads by `{self._words}`"


class _Drawn(NamedTuple):
    batch: Any
    vote: int
    """1 for a batch that is not repeated, `_NOTHING` if there is none to repeat, otherwise 0."""
    position: Any
    """Of the user's loader after this batch; None if it has none."""


class _Answer(NamedTuple):
    haves: Sequence[float]
    """For each batch: how many ranks have one of their own. Zeros follow."""
    all_double: bool
    """Whether twice as many batches may be read ahead next."""


def _may_double(drawn: Collection[_Drawn]) -> bool:
    """Whether twice as many batches as these may be read ahead on this rank."""
    if len(drawn) == _MOST_AHEAD:
        return False
    return (
        len(drawn) < _AHEAD or 2 * sum(_num_bytes((each.batch, each.position)) for each in drawn) <= _MOST_AHEAD_BYTES
    )


def _num_bytes(value: Any) -> float:
    """Of the tensors and arrays; infinite if there are objects of other sizes."""
    total = 0.0

    def add(leaf: Any) -> None:
        nonlocal total
        if isinstance(leaf, (str, bytes)):
            total += len(leaf)
        elif leaf is not _END and not isinstance(leaf, (int, float, complex, type(None))):
            total += getattr(leaf, "nbytes", math.inf)

    map_leaves(add, value, is_leaf=is_tensor)
    return total


@final
class _Supply:
    """One rank's batches of one iteration; at their end the last one again, if `example` is given."""

    def __init__(
        self,
        batches: Iterator[Any],
        example: Callable[[], Any] | None,
        tail: Tail,
        save: Callable[[], Any],
    ) -> None:
        """`save`: returns the position of the user's loader after the batch read last; None if it has none."""
        self._batches, self._example, self._repeats, self._save = batches, example, example is not None, save
        self.position: Any = None
        """Of the user's loader after the batch that was yielded last, if others are read ahead."""
        self.last = tail.last
        """What is repeated."""
        self.num_read = 0
        """Number of batches read, without repeated ones."""
        self.ended = tail.ended

    def draw(self) -> _Drawn:
        """The next batch; `_END` if there is none."""
        batch = _END if self.ended else next(self._batches, _END)
        if batch is not _END:
            self.num_read += 1
            self.last = batch if self._repeats else None
            self._example = None  # it refers to the loader, which refers to this: a cycle would keep its position alive
            return _Drawn(batch, 1, self._save())
        self.ended = True
        if self.last is None and self._example is not None:
            self.last = self._example()
        self._example = None
        if self.last is not None:
            return _Drawn(self.last, 0, self._save())
        return _Drawn(_END, _NOTHING if self._repeats else 0, None)


def _ranks(chosen: list[bool]) -> str:
    ranks = [str(rank) for rank, is_chosen in enumerate(chosen) if is_chosen]
    shown = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _per_rank(numbers: list[int]) -> str:
    shown = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers[:8]))
    return shown + (f", and {len(numbers) - 8} ranks more" if len(numbers) > 8 else "")
