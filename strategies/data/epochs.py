"""The order of samples in an epoch, the same on all ranks whatever random numbers each rank has drawn.

It depends on a seed that the ranks agreed on and on the epoch's number; if the user's sampler has random generators of
its own, on those. The epoch's number increases once its iteration has ended or has yielded a second batch, or once
the loop has called backward: `next(iter(loader))` on one rank changes nothing on any rank. The position within an
epoch is that of the loop, not of prefetching workers. Knows items and epochs; knows no loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, final

from torch.utils.data import DataLoader, SequentialSampler

from fabric.strategies.data.rng import Rng, Streams, mix
from fabric.strategies.data.take import length_of, once

T = TypeVar("T")


@final
class Drawn(Generic[T]):
    """The items of a sampler, drawn from the random streams of one epoch: those of one step at first, then of twice as
    many steps, up to `most_steps`.

    It starts small so that a slow sampler yields its first item soon, and grows because each draw saves and restores
    the states of the random generators.
    """

    def __init__(
        self, items: Iterable[T], streams: Streams, reads: tuple[int, int], *, most_steps: int = 1, eager: bool = False
    ) -> None:
        """`reads`: how many items must be read for the first step, and for each further one. `eager`: `iter` is called
        on the items now."""
        self._items, self._streams, self._reads, self._most_steps = items, streams, reads, most_steps
        self._iterator: Iterator[T] | None = None
        self._rest: list[T] = []
        self.ended = False
        if eager:
            with self._drawing():
                self._iterator = once(iter(items))

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._chunks())

    @property
    def sized(self) -> bool:
        """Whether the sampler has a length, so that all its items can be drawn."""
        return length_of(self._items) is not None

    def finish(self) -> None:
        """Draw all remaining items now. An iterator that is still in use yields them."""
        if not self.ended:
            self._rest = self._draw(None)
            self.ended = True

    def _chunks(self) -> Iterator[list[T]]:
        count, step = self._reads
        following, largest = step, step * self._most_steps
        while not self.ended:
            chunk = self._draw(count)
            self.ended = len(chunk) < count
            count, following = following, min(2 * following, largest)
            yield chunk
        yield self._rest

    def _draw(self, count: int | None) -> list[T]:
        with self._drawing():
            if self._iterator is None:
                self._iterator = once(iter(self._items))
            return list(islice(self._iterator, count))

    def _drawing(self) -> AbstractContextManager[None]:
        items = self._items
        by_workers = type(items) is DataLoader and items.num_workers > 0 and self._iterator is not None
        return nullcontext() if by_workers or type(items) in _WITHOUT_DRAWS else self._streams.drawing()


# To save and restore the generators costs a tenth of a millisecond and more.
_WITHOUT_DRAWS = (SequentialSampler, range, list, tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of the loop within an epoch."""

    start: int = 0
    """Samples of the order that were read by earlier runs with another number of samples per step."""
    batches: int = 0
    """Batches that the loop has received after them, on each rank."""
    samples: int = 0
    """Samples that all ranks together have received, `start` included."""


class Part(NamedTuple):
    """One rank's batch of a step."""

    batch: Any
    end: int
    """Number of samples that all ranks together have read in this iteration, up to the end of this step."""
    is_unequal: bool = False
    """Whether the ranks' batches of this step have different numbers of samples."""


@final
class Epoch:
    """One iteration over a loader: the number of its epoch, its random streams, and the items drawn from them.

    `begun_at`: where the iteration begins. `counted`: the number is used up, so the next iteration is the next epoch.
    `over`: all batches were received.
    """

    def __init__(
        self, number: int, streams: Streams, begun_at: Position, seed_workers: Callable[[], object] | None
    ) -> None:
        """`seed_workers`: draws when a loader begins to read the items."""
        self.number, self.streams, self.begun_at, self._seed_workers = number, streams, begun_at, seed_workers
        self.drawn: Drawn[Any] | None = None
        self.counted = self.over = False
        self.num_batches = begun_at.batches
        """How many batches the loop has received, with those before `begun_at`."""
        self._num_passed, self._end = begun_at.batches, begun_at.samples - begun_at.start
        self._fetched: deque[Part] = deque()
        """Those after `_num_passed`."""
        self.has_unequal = False
        """Whether batches were fetched that have different numbers of samples on the ranks."""

    @property
    def position(self) -> Position:
        """Where the loop is."""
        self._pass()
        start = self.begun_at.start
        return Position(start=start, batches=self.num_batches, samples=start + self._end)

    def fetch(self, parts: list[Part]) -> None:
        """Called with parts that are about to be loaded."""
        self._pass()
        self._fetched += parts
        self.has_unequal = self.has_unequal or any(map(attrgetter("is_unequal"), parts))

    def _pass(self) -> None:
        """Find the part that the loop received last: when it is needed, not at each batch."""
        while self._num_passed < self.num_batches:
            self._num_passed += 1
            self._end = self._fetched.popleft().end if self._fetched else self._end  # no sampler was read

    def end(self, is_over: bool) -> None:
        """Called once the loop has left the epoch. `is_over`: it has asked for a batch after the last one."""
        self.over = is_over

    def draw(self, items: Iterable[T], reads: tuple[int, int], *, most_steps: int, eager: bool) -> Iterator[T]:
        """Iterate over `items`, see `Drawn`.

        Some loaders iterate their sampler twice and read the second iterator: torch's with workers, torchdata's when
        they resume.
        """
        if self.drawn is not None:
            self.streams.restart()
        self._pass()
        self._fetched.clear()
        self.drawn = Drawn(items, self.streams, reads, most_steps=most_steps, eager=eager)
        if self._seed_workers is not None:
            with self.streams.drawing():
                self._seed_workers()
        return iter(self.drawn)


@final
class Order:
    """The epochs of one loader: the seed, the number of the next epoch, and the latest epoch."""

    def __init__(
        self,
        seed: int,
        own: Sequence[Rng] = (),
        *,
        seed_workers: Callable[[], object] | None = None,
        keeps_workers: bool = False,
        from_torch: bool = False,
    ) -> None:
        """`own`: the sampler's generators. `seed_workers`: draws a seed for workers when each epoch begins, or the
        first alone, if the loader `keeps_workers`. `from_torch`: of the global generators, the sampler and the loader
        draw from torch's alone."""
        self.seed, self.own, self.epoch = seed, own, 0
        self._seed_workers, self._keeps_workers, self._from_torch = seed_workers, keeps_workers, from_torch
        self.latest: Epoch | None = None
        self.standing: Epoch | None = None
        """The epoch of the loop's latest batch."""
        self._resumed: tuple[int, Position] | None = None
        """A restored epoch number and position."""
        self._following: list[Any] | None = None
        """The states of `own` after the restored epoch, which the loop had left."""
        self._opening: Epoch | None = None
        self._unsettled: Epoch | None = None

    @contextmanager
    def opening(self) -> Iterator[Epoch]:
        """Within the context, `begin` returns the epoch that it yields, and random numbers come from its streams."""
        self._opening = self._new()
        try:
            with self._opening.streams.drawing():
                yield self._opening
        finally:
            self._opening = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context: an iteration begins at the first batch of the epoch, and the order stays as it is."""
        kept = self.latest, self._opening
        self._opening = self._epoch(Position())
        try:
            with self._opening.streams.drawing():
                yield
        finally:
            self.latest, self._opening = kept

    def begin(self) -> Epoch:
        """The epoch of the enclosing `opening`, or a new one."""
        self.latest = self._opening or self._new()
        return self.latest

    def count(self, epoch: Epoch) -> None:
        """Use up the number of `epoch`: the next is one higher, unless `set_epoch` was called meanwhile."""
        if epoch.counted:
            return
        epoch.counted = True
        self._unsettled, self._resumed, self._following = epoch, None, None
        if self.epoch == epoch.number:
            self.epoch += 1

    def settle(self) -> None:
        """Advance the sampler's generators to the end of the latest counted epoch.

        An order of known length is drawn to its end even if the loop ended early: the ranks may have left it at
        different batches, and their generators must stay equal.
        """
        epoch, self._unsettled = self._unsettled, None
        if epoch is None or epoch.drawn is None or not self.own:
            return
        if epoch.drawn.sized:
            epoch.drawn.finish()
        epoch.streams.settle(complete=epoch.drawn.ended)

    def state_dict(self, *, is_mid_epoch: bool = True) -> dict[str, Any]:
        """The position of the loop: within its epoch, or at the start of the next one; there always, if not
        `is_mid_epoch`."""
        epoch = self.standing
        if epoch is not None and not epoch.over and is_mid_epoch:
            number, position, own = epoch.number, epoch.position, epoch.streams.begun
            is_settled = epoch.counted and self._unsettled is not epoch
            following = [rng.read() for rng in self.own] if is_settled and self.own else None
        else:
            number, position, own = self.epoch, self._beginning(), [rng.read() for rng in self.own]
            following = self._following
        state = {"seed": self.seed, "epoch": number, "generators": own, **asdict(position)}
        return state if following is None else state | {"following": following}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration begin at the position in `state`."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._resumed = self.epoch, Position(**{name: state[name] for name in ("start", "batches", "samples")})
        self.latest = self.standing = self._unsettled = None
        self._following = state.get("following")
        for rng, own in zip(self.own, state["generators"], strict=True):
            rng.write(own)

    def seed_of(self, epoch: Epoch, end: int, reader: int) -> int:
        """The seed for loading the batch that ends after `end` samples of the epoch, in workers of share `reader`."""
        return mix(self.seed, epoch.number, "batch", end, reader)

    def _new(self) -> Epoch:
        self.settle()
        if self._following is not None and self._resumed is not None and self._resumed[0] != self.epoch:
            for rng, state in zip(self.own, self._following, strict=True):
                rng.write(state)
            self._following = None
        return self._epoch(self._beginning())

    def _epoch(self, begun_at: Position) -> Epoch:
        streams = Streams(mix(self.seed, self.epoch), self.own, from_torch=self._from_torch)
        has_new_workers = self.epoch == 0 or not self._keeps_workers
        return Epoch(self.epoch, streams, begun_at, self._seed_workers if has_new_workers else None)

    def _beginning(self) -> Position:
        """Where the next epoch begins: a restored position is dropped if `set_epoch` has chosen another epoch."""
        number, position = self._resumed or (None, Position())
        return position if number == self.epoch else Position()
