"""In which order an epoch reads: one order for all ranks, whatever each rank has drawn or peeked at.

The order of an epoch follows from a seed that the ranks agreed on and from the epoch's number; where the user's
sampler has random generators of its own, from those. An epoch counts once its iteration has ended or has yielded a
second batch, or once the loop has called backward: `next(iter(loader))` on one rank changes nothing on any. The
position within an epoch is that of the loop, not of what workers have fetched. Knows items and epochs; knows no loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any, Generic, TypeVar, final

from fabric.strategies.data.rng import Rng, Streams, digest, mix

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """How many items are drawn at a time: `first`, then `step`, then twice that, up to `largest`.

    Growing, a slow sampler gives its first item soon, and a fast one is not slowed by the exchange of streams.
    """

    first: int
    step: int
    largest: int


@final
class Drawn(Generic[T]):
    """The items of a sampler, drawn a few at a time from the streams of one epoch."""

    def __init__(self, items: Iterable[T], streams: Streams, reads: Reads) -> None:
        self._items, self._streams, self._reads = items, streams, reads
        self._iterator: Iterator[T] | None = None
        self._rest: list[T] = []
        self.ended = False

    def begin(self, *, again: bool) -> None:
        """Begin now, for samplers that draw when they begin; `again`: from where the epoch's streams began."""
        with self._streams.drawing_again() if again else self._streams.drawing():
            self._iterator = iter(self._items)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._chunks())

    @property
    def sized(self) -> bool:
        """Whether the items have an end that can be drawn to."""
        try:
            len(self._items)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return False
        return True

    def finish(self) -> None:
        """Draw all that is left now. Whoever still iterates gets it all the same."""
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
        with self._streams.drawing():
            if self._iterator is None:
                self._iterator = iter(self._items)
            return list(islice(self._iterator, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the loop has come in an epoch."""

    start: int = 0
    """Samples of the order that were read before, by runs that cut it into other steps."""
    batches: int = 0
    """Batches that the loop has received since, on each rank."""
    samples: int = 0
    """Samples that all ranks have received with them, those of `start` included."""


@final
class Epoch:
    """One iteration over a loader: the number of its epoch, its streams, and what is drawn from them.

    `begun_at`: where the iteration begins, `position`: where the loop stands.
    """

    def __init__(self, number: int, streams: Streams, begun_at: Position) -> None:
        self.number, self.streams = number, streams
        self.drawn: Drawn[Any] | None = None
        self.counted = self.over = False
        self.begun_at = self.position = begun_at
        self.fetched: deque[tuple[int, bool]] = deque()
        """For each batch that was asked for and that the loop has not received: the samples read with it, and whether
        it has another number of samples on other ranks."""
        self.is_unequal = False
        """Whether the batch that the loop has received last has."""

    def receive(self) -> None:
        """Say that the loop has got another batch."""
        samples, self.is_unequal = self.fetched.popleft() if self.fetched else (self.position.samples, False)
        self.position = replace(self.position, batches=self.position.batches + 1, samples=samples)

    def draw(self, items: Iterable[T], reads: Reads, *, eager: bool) -> Iterator[T]:
        """Iterate over `items`; `eager` begins at once.

        Loaders begin an epoch twice, torch's with workers, torchdata's when they resume, and read the second.
        """
        drawn, again = Drawn(items, self.streams, reads), self.drawn is not None
        self.fetched.clear()
        if eager:
            drawn.begin(again=again)
        self.drawn = drawn
        return iter(drawn)


@final
class Order:
    """The epochs of one loader: the seed, the number of the next epoch, and the epoch begun last."""

    def __init__(self, seed: int, own: list[Rng], states: Sequence[Any] = ()) -> None:
        """`states`: those of rank 0, which the generators take over when the first epoch begins."""
        self.seed, self.own, self.epoch = seed, own, 0
        self._adopted = [(rng, digest(rng.read()), state) for rng, state in zip(own, states, strict=bool(states))]
        self.latest: Epoch | None = None
        self.standing: Epoch | None = None
        """The epoch that the loop has received its last batch from."""
        self._resumed: tuple[int, Position] | None = None
        """An epoch, and where its iteration begins."""
        self._opening: Epoch | None = None
        self._unsettled: Epoch | None = None

    @contextmanager
    def opening(self) -> Iterator[Epoch]:
        """Within it, whoever begins an epoch begins this one, under its random streams."""
        self._opening = self._new()
        try:
            with self._opening.streams.drawing():
                yield self._opening
        finally:
            self._opening = None

    def begin(self) -> Epoch:
        """The epoch that is being opened, or a new one."""
        self.latest = self._opening or self._new()
        return self.latest

    def receive(self, epoch: Epoch) -> None:
        """Say that the loop has got another batch of `epoch`: there it stands."""
        epoch.receive()
        self.standing = epoch

    def count(self, epoch: Epoch) -> None:
        """Say that `epoch` was more than a peek. The number moves on, unless somebody has set it meanwhile."""
        if epoch.counted:
            return
        epoch.counted = True
        self._unsettled, self._resumed = epoch, None
        if self.epoch == epoch.number:
            self.epoch += 1

    def settle(self) -> None:
        """Let the user's own generators go on from the end of the epoch that was counted last.

        An order of known length is drawn to its end even where the iteration was left early: the ranks may have
        left it at different batches, and go on together.
        """
        epoch, self._unsettled = self._unsettled, None
        if epoch is None or epoch.drawn is None or not self.own:
            return
        if epoch.drawn.sized:
            epoch.drawn.finish()
        epoch.streams.settle(complete=epoch.drawn.ended)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: in the epoch that it reads, or before the next one."""
        self._adopt()
        epoch = self.standing
        if epoch is not None and not epoch.over:
            number, position, own = epoch.number, epoch.position, epoch.streams.begun
        else:
            number, position, own = self.epoch, self._beginning(), [rng.read() for rng in self.own]
        return {"seed": self.seed, "epoch": number, "generators": own, **asdict(position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch begin where `state` was taken."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._resumed = self.epoch, Position(**{name: state[name] for name in ("start", "batches", "samples")})
        self.latest = self.standing = self._unsettled = None
        self._adopted.clear()
        for rng, own in zip(self.own, state["generators"], strict=True):
            rng.write(own)

    def seed_of(self, epoch: Epoch, end: int, reader: int) -> int:
        """The seed of what `reader` draws while it loads the batch that ends after `end` samples of the epoch."""
        return mix(self.seed, epoch.number, "batch", end, reader)

    def _adopt(self) -> None:
        """Write the states of rank 0, but for a generator that the user has moved since: then that is the order."""
        for rng, before, state in self._adopted:
            if digest(rng.read()) == before != digest(state):
                rng.write(state)
        self._adopted.clear()

    def _new(self) -> Epoch:
        self._adopt()
        self.settle()
        return Epoch(self.epoch, Streams(mix(self.seed, self.epoch), self.own), self._beginning())

    def _beginning(self) -> Position:
        """Where the next epoch begins. An epoch that the user has chosen since begins with its first sample."""
        number, position = self._resumed or (self.epoch, Position())
        return position if number == self.epoch else Position()
