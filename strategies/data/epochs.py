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
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, final

from torch.utils.data import DataLoader, SequentialSampler

from fabric.strategies.data.rng import Rng, Streams, digest, mix
from fabric.strategies.data.take import length_of, take

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """How many items are drawn at a time: `first`, then `step`, then twice that, up to `largest`.

    It starts small so that a slow sampler yields its first item soon, and grows because each draw saves and restores
    the states of the random generators.
    """

    first: int
    step: int
    largest: int
    num_steps: int = 1
    """How many steps are divided over ranks at a time."""


@final
class Drawn(Generic[T]):
    """The items of a sampler, drawn in chunks from the random streams of one epoch."""

    def __init__(self, items: Iterable[T], streams: Streams, reads: Reads) -> None:
        self._items, self._streams, self._reads = items, streams, reads
        self._iterator: Iterator[T] | None = None
        self._rest: list[T] = []
        self.ended = False

    def begin(self, *, again: bool) -> None:
        """Call `iter` on the sampler now, since some draw in it; `again`: with the streams at the epoch's beginning."""
        with self._streams.drawing_again() if again else self._drawing():
            self._iterator = iter(self._items)

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
        count, following = self._reads.first, self._reads.step
        while not self.ended:
            chunk = self._draw(count)
            self.ended = len(chunk) < count
            count, following = following, min(2 * following, self._reads.largest)
            yield chunk
        yield self._rest

    def _draw(self, count: int | None) -> list[T]:
        with self._drawing():
            if self._iterator is None:
                self._iterator = iter(self._items)
            return take(self._iterator, count)

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

    `begun_at`: where the iteration begins. `counted`: the number is used up, so the
    next iteration is the next epoch. `over`: all batches were received.
    """

    def __init__(self, number: int, streams: Streams, begun_at: Position, *, seeds_workers: bool) -> None:
        self.number, self.streams = number, streams
        self.seeds_workers = seeds_workers
        """See Note [The seed of the workers]."""
        self.seed_workers: Callable[[], object] | None = None
        """Draws a seed that the loader does not draw itself."""
        self.drawn: Drawn[Any] | None = None
        self.counted = self.over = False
        self.begun_at = begun_at
        self.num_batches = begun_at.batches
        """How many batches the loop has received, with those before `begun_at`."""
        self._num_passed, self._latest = begun_at.batches, Part(None, begun_at.samples - begun_at.start)
        self._fetched: deque[Part] = deque()
        """Those after `_num_passed`."""
        self.has_unequal = False
        """Whether batches were fetched that have different numbers of samples on the ranks."""

    @property
    def position(self) -> Position:
        """Where the loop is."""
        start = self.begun_at.start
        return Position(start=start, batches=self.num_batches, samples=start + self._pass().end)

    @property
    def is_unequal(self) -> bool:
        """Whether the number of samples of the latest batch differs between ranks."""
        return self._pass().is_unequal

    def fetch(self, parts: list[Part]) -> None:
        """Called with parts that are about to be loaded."""
        self._pass()
        self._fetched += parts
        self.has_unequal = self.has_unequal or any(map(attrgetter("is_unequal"), parts))

    def _pass(self) -> Part:
        """The part that the loop received last; only its end is known if no sampler was read.

        It is looked for when it is needed, not at each batch, which would take a microsecond.
        """
        while self._num_passed < self.num_batches:
            self._num_passed += 1
            self._latest = self._fetched.popleft() if self._fetched else Part(None, self._latest.end)
        return self._latest

    def end(self, is_over: bool) -> None:
        """Called once the loop has left the epoch. `is_over`: it has asked for a batch after the last one."""
        self.over = is_over

    def draw(self, items: Iterable[T], reads: Reads, *, eager: bool) -> Iterator[T]:
        """Iterate over `items`; `eager` calls `iter` on them at once.

        Some loaders iterate their sampler twice and read the second iterator: torch's with workers, torchdata's when
        they resume.
        """
        drawn, again = Drawn(items, self.streams, reads), self.drawn is not None
        self._pass()
        self._fetched.clear()
        if eager:
            drawn.begin(again=again)
        if self.seed_workers is not None:
            with self.streams.drawing():
                self.seed_workers()
        self.drawn = drawn
        return iter(drawn)


@final
class Order:
    """The epochs of one loader: the seed, the number of the next epoch, and the latest epoch."""

    def __init__(self, seed: int, own: list[Rng], states: Sequence[Any] = (), *, from_torch: bool = False) -> None:
        """`own`: the sampler's generators. `states`: theirs on rank 0, copied into them when the first epoch begins.
        `from_torch`: of the global generators, the sampler and the loader draw from torch's alone."""
        self.seed, self.own, self.epoch, self._from_torch = seed, own, 0, from_torch
        self._adopted = [(rng, digest(rng.read()), state) for rng, state in zip(own, states, strict=bool(states))]
        self.keeps_workers = False
        """Whether the next iteration finds the workers of the one before."""
        self.latest: Epoch | None = None
        self.standing: Epoch | None = None
        """The epoch of the loop's latest batch."""
        self._resumed: tuple[int, Position, bool] | None = None
        """A restored epoch number, position and `seeds_workers`."""
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
        self._opening = Epoch(self.epoch, self._streams(), Position(), seeds_workers=True)
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
        self._adopt()
        epoch = self.standing
        if epoch is not None and not epoch.over and is_mid_epoch:
            number, position, own = epoch.number, epoch.position, epoch.streams.begun
            seeds_workers = epoch.seeds_workers
            is_settled = epoch.counted and self._unsettled is not epoch
            following = [rng.read() for rng in self.own] if is_settled and self.own else None
        else:
            number, own = self.epoch, [rng.read() for rng in self.own]
            position, seeds_workers = self._beginning()
            following = self._following
        return {
            "seed": self.seed,
            "epoch": number,
            "generators": own,
            "seeds_workers": seeds_workers,
            **asdict(position),
        } | ({} if following is None else {"following": following})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration begin at the position in `state`."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        position = Position(**{name: state[name] for name in ("start", "batches", "samples")})
        self._resumed = self.epoch, position, state["seeds_workers"]
        self.latest = self.standing = self._unsettled = None
        self._adopted.clear()
        self._following = state.get("following")
        for rng, own in zip(self.own, state["generators"], strict=True):
            rng.write(own)

    def seed_of(self, epoch: Epoch, end: int, reader: int) -> int:
        """The seed for loading the batch that ends after `end` samples of the epoch, in workers of share `reader`."""
        return mix(self.seed, epoch.number, "batch", end, reader)

    def _adopt(self) -> None:
        """Copy rank 0's states into the generators, except into those that the user has reseeded or used since."""
        for rng, before, state in self._adopted:
            if digest(rng.read()) == before != digest(state):
                rng.write(state)
        self._adopted.clear()

    def _new(self) -> Epoch:
        self._adopt()
        self.settle()
        if self._following is not None and self._resumed is not None and self._resumed[0] != self.epoch:
            for rng, state in zip(self.own, self._following, strict=True):
                rng.write(state)
            self._following = None
        position, seeds_workers = self._beginning()
        return Epoch(self.epoch, self._streams(), position, seeds_workers=seeds_workers)

    def _streams(self) -> Streams:
        return Streams(mix(self.seed, self.epoch), self.own, from_torch=self._from_torch)

    def _beginning(self) -> tuple[Position, bool]:
        """Where the next epoch begins: a restored position is dropped if `set_epoch` has chosen another epoch.

        # Note [The seed of the workers]
        When torch starts workers it draws a seed for them, before the sampler's first draw; persistent workers get none
        in later epochs. A resumed run starts workers in an epoch in which the saved run kept them, so the order of the
        epoch must not depend on that. From generators of the sampler the order is that of plain PyTorch, so whether
        there was a seed is saved; from our own streams there always is one.
        """
        number, position, seeds_workers = self._resumed or (None, Position(), True)
        if number == self.epoch:
            return position, seeds_workers
        return Position(), not (self.keeps_workers and self.own)
