"""The order of samples in an epoch: torch's own in one process, the same on all ranks of several.

In one process the order is drawn from the generators of the process and of the user's sampler, as they are. Ranks that
share an order draw it from copies of rank 0's states, which all loaders share: see Note [Rank 0 leads] in `rng.py`. The
epoch's number increases once its iteration has ended or has yielded a second batch, or once the loop has called
backward. An iteration that the loop leaves earlier (`next(iter(loader))`) changes the order on no rank. If `set_epoch`
chooses an epoch that is not the next, its order is drawn from its number and the seed that ranks have agreed on. The
position within an epoch is that of the loop, whatever workers have prefetched. Knows items and epochs; knows no loader.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from fabric.strategies.data.cursor import Cursor, Iteration
from fabric.strategies.data.partition import Part, length_of, once
from fabric.strategies.data.rng import EpochRngs, SharedRngs, digest, mix, preserved_rngs, read_all, write_all
from fabric.strategies.tensors.generator_interface import Rng

T = TypeVar("T")


@final
@dataclass(eq=False)
class Drawn(Generic[T]):
    """The items of a sampler, drawn from the random states of one epoch: the items of one step at first, then of twice
    as many steps each time, up to `most_steps`.

    The first draw is small so that a slow sampler yields its first item soon. Draws grow because each of them saves and
    restores the states of the random generators.
    """

    items: Iterable[T]
    rngs: EpochRngs
    reads: tuple[int, int]
    """How many items must be read for the first step, and for each further one."""
    most_steps: int
    eager: bool
    """Whether `iter` is called on the items now."""
    expected: Sequence[int]
    """The first indices in the run that is resumed."""
    first: Sequence[int] | None = None
    """The first indices of the order, once they are drawn; empty if items are not indices, or batches of them."""
    ended: bool = False
    _iterator: Iterator[T] | None = None
    _rest: Sequence[T] = ()

    def __post_init__(self) -> None:
        if self.eager:
            with self.rngs.drawing():
                self._iterator = self._begin()

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._chunks())

    def is_complete(self, *, finish: bool) -> bool:
        """Whether all items that need random numbers are drawn. `finish`: draw the remaining items now, if their number
        is known; an iterator that is still in use yields them."""
        if type(getattr(self.items, "sampler", self.items)) is SequentialSampler:  # may be very many
            return True
        if finish and not self.ended and length_of(self.items) is not None:
            self._rest = self._draw(None)
            self.ended = True
        return self.ended

    def _chunks(self) -> Iterator[Sequence[T]]:
        count, step = self.reads
        following, largest = step, step * self.most_steps
        while not self.ended:
            chunk = self._draw(count)
            if self.first is None:
                self.first = _indices_in(chunk)
                if any(here != there for here, there in zip(self.first, self.expected, strict=False)):
                    raise ValueError(_OTHER_ORDER.format(there=self.expected, here=self.first))
            self.ended = len(chunk) < count
            count, following = following, min(2 * following, largest)
            yield chunk
        yield self._rest

    def _draw(self, count: int | None) -> list[T]:
        with self.rngs.drawing():
            if self._iterator is None:
                self._iterator = self._begin()
            return list(islice(self._iterator, count))

    def _begin(self) -> Iterator[T]:
        self.rngs.begin()
        return once(iter(self.items))


def _indices_in(items: Iterable[Any]) -> list[int]:
    """The first indices in indices, or in batches of them; none in anything else."""
    lists = (item.tolist() if type(item) is Tensor and not item.is_floating_point() else item for item in items)
    flat = chain.from_iterable(item if isinstance(item, (list, tuple)) else [item] for item in lists)
    return [index for index in islice(flat, NUM_COMPARED) if isinstance(index, int)]


NUM_COMPARED = 8
_OTHER_ORDER = (
    "The checkpoint has the position of a loader whose epoch begins with the samples {there}; here it begins with "
    "{here}, so some would be read twice and others never. Construct the same dataset and sampler, keep a random "
    "generator of your own sampler in its attributes, or start a new epoch with `set_epoch`."
)


@final
@dataclass(eq=False)
class Epoch:
    """The epoch of one iteration over a loader: its random states, and the items drawn from them."""

    begun_at: Cursor
    rngs: EpochRngs
    agreed_seed: int | None
    """The seed on which ranks have agreed; None: of this process."""
    seed_of_rank: int
    """What this rank's generator was seeded with last, if ranks share the order."""
    seed_workers: Callable[[int], object] | None
    """Draws what torch has drawn before its sampler does."""
    num_ahead: int
    """How many parts after `begun_at` the saved run had drawn."""
    drawn: Drawn[Any] | None = None
    counted: bool = False
    """Whether the number is used up, so that the next iteration is the next epoch."""
    iteration: Iteration = field(default_factory=Iteration)
    """Which batches of it the loop has received."""
    has_unequal: bool = False
    """Whether batches were fetched that have different numbers of samples on the ranks."""
    _state: Tensor = field(default_factory=torch.get_rng_state)
    _num_passed: int = 0
    _fetched: deque[Part] = field(default_factory=deque)
    """The parts after the first `_num_passed`."""

    def __post_init__(self) -> None:
        self.number = self.begun_at.epoch
        self._end = self.begun_at.samples - self.begun_at.start

    @property
    def seed(self) -> int:
        """The seed that, with the epoch's number, seeds workers: agreed by the ranks, or of this process."""
        if self.agreed_seed is None:
            self.agreed_seed = mix("epoch", digest(self._state))
        return self.agreed_seed

    def seed_of_batch(self, end: int) -> int:
        """The seed for the batch that ends after so many samples of this iteration, for its worker."""
        return mix(self.seed, self.seed_of_rank, self.number, self.begun_at.start + end)

    @property
    def cursor(self) -> Cursor:
        """Where the loop is."""
        self._pass()
        first = () if self.drawn is None else self.drawn.first or ()
        at, iteration = self.begun_at, self.iteration
        batches, samples = at.batches + iteration.num_own, at.start + self._end
        only_repeats = iteration.only_repeats
        return replace(at, batches=batches, samples=samples, left=None, first=first, only_repeats=only_repeats)

    @property
    def num_fetched(self) -> int:
        """How many parts were fetched after `cursor`."""
        return len(self._fetched)

    def fetch(self, parts: list[Part]) -> None:
        """Called with parts that are about to be loaded."""
        self._pass()
        self._fetched += parts
        self.has_unequal = self.has_unequal or any(map(attrgetter("is_unequal"), parts))

    def _pass(self) -> None:
        """Find the part that the loop received last: when it is needed, not at each batch."""
        num_received = self.iteration.num_own
        for _ in range(num_received - self._num_passed):
            self._end = self._fetched.popleft().end if self._fetched else self._end  # no sampler was read
        self._num_passed = num_received

    def draw(self, items: Iterable[T], reads: tuple[int, int], *, most_steps: int, eager: bool) -> Iterator[T]:
        """Iterate over `items`, see `Drawn`.

        Some loaders iterate their sampler twice and read the second iterator: torch's with workers, torchdata's when
        they resume.
        """
        self._pass()
        self._fetched.clear()
        with self.rngs.drawing():
            if self.seed_workers is not None:
                self.rngs.restart()
            self.drawn = Drawn(items, self.rngs, reads, most_steps, eager, self.begun_at.first)
            if self.seed_workers is not None:
                self.seed_workers(self.number)
        return iter(self.drawn)


@final
@dataclass(eq=False)
class Order:
    """The epochs of one loader: the number of the next one, the generators it is drawn from, and the latest epoch."""

    seed: int = 0
    process: Mapping[str, Rng] = field(default_factory=dict)
    """The generators of the process that the order is drawn from."""
    own: Sequence[Rng] = ()
    """The sampler's generators."""
    shared: SharedRngs | None = None
    """Where several ranks have this order: see Note [Rank 0 leads]. None: it is drawn from the generators as they
    are."""
    lead: Callable[[str, Any], Any] | None = None
    """Returns rank 0's object of that name, if ranks draw from rank 0's states."""
    is_alone: bool = False
    """Whether some ranks may draw from the process's generators while others do not."""
    seed_workers: Callable[[int], object] | None = None
    """For samplers: draws what torch draws when the epoch of this number begins."""
    keeps_workers: bool = False
    """Whether torch draws that in the first epoch alone."""
    epoch: int = 0
    """The number of the next epoch."""
    rank: int = 0
    """Beside the seed of the rank's generator, what workers draw from."""
    latest: Epoch | None = None
    standing: Epoch | None = None
    """The epoch of the loop's latest batch."""
    restored: Cursor | None = None
    """The position that was loaded, until its epoch is counted."""
    _restored_rngs: dict[str, Any] = field(default_factory=dict)
    """The random states of that position."""
    _next: int = 0
    """The number of the epoch that follows without `set_epoch`."""
    _num_begun: int = 0
    _led: tuple[str, dict[str, Any]] = field(default_factory=lambda: ("", {}))
    """A name of the epoch that begins next, and the states from which ranks draw it."""
    _opening: Epoch | None = None
    _unsettled: Epoch | None = None

    def __post_init__(self) -> None:
        self._first = self._chain = {} if self.shared is None else self.shared.states
        """The process's states when the loader was set up, and after its latest epoch."""
        self._chain_at: object = None if self.shared is None else self.shared.agreed
        self._number = 0 if self.shared is None else self.shared.num_loaders

    @property
    def is_shared(self) -> bool:
        """Whether several ranks have this order."""
        return self.shared is not None

    @contextmanager
    def opening(self) -> Iterator[Epoch]:
        """Within the context, `begin` returns the epoch that it yields, and random numbers come from its states."""
        self._opening = self._new()
        try:
            with self._opening.rngs.drawing():
                yield self._opening
        finally:
            self._opening = None

    @contextmanager
    def peeking(self) -> Iterator[None]:
        """Context: an iteration begins at the first batch of the epoch, and order and generators stay as they are."""
        kept = self.latest, self._opening
        try:
            with preserved_rngs(self.own):
                self._opening = self._epoch(Cursor(epoch=self.epoch), is_peek=True)
                with self._opening.rngs.drawing():
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
        self._unsettled, self.restored = epoch, None
        self._num_begun += 1
        self._next = epoch.number + 1
        if self.epoch == epoch.number:
            self.epoch += 1

    def leave(self, epoch: Epoch) -> None:
        """Called once the loop has left an iteration, which is counted, or changes nothing."""
        if epoch.counted:
            self.settle()
        else:
            epoch.rngs.undo()

    def settle(self) -> None:
        """Advance the states that ranks share to the end of the latest counted epoch.

        If the number of indices is known, all of them are drawn even if the loop ended early: ranks may have left the
        loop at different batches, and must draw equal orders next. The generators follow as in one process, so that a
        loader that is set up next has another order. Generators that the program has seeded or used keep their states,
        except for the draw with which torch begins an epoch.
        """
        epoch, self._unsettled = self._unsettled, None
        if epoch is None or self.shared is None:
            return
        rngs = epoch.rngs
        if not self._is_complete(epoch):
            rngs.move(self._seeded(epoch.number + 1))  # ranks may have drawn different numbers of items
        for rng, start, end in zip(self.own, rngs.own_start, rngs.own_states, strict=True):
            if digest(rng.read()) == digest(start):
                rng.write(end)
        self._chain, self._chain_at = dict(zip(self.process, rngs.states, strict=False)), self.shared.agreed
        self.shared.follow()

    def _is_complete(self, epoch: Epoch) -> bool:
        return epoch.drawn is None or epoch.drawn.is_complete(finish=self.seed_workers is not None)

    def _by_name(self, states: Sequence[Any]) -> dict[str, Any]:
        num = len(self.process)
        return {"process": dict(zip(self.process, states, strict=False)), "generators": states[num:]}

    @property
    def begins_at(self) -> Cursor:
        """Where the next iteration begins."""
        return Cursor(epoch=self.epoch) if self.restored is None else self.restored.in_epoch(self.epoch)

    @property
    def is_restored(self) -> bool:
        """Whether the loop is where a position was loaded: it has received no batch since, or has looked at one."""
        return self.restored is not None and self.standing is None

    def position(self, *, is_mid_epoch: bool) -> tuple[Cursor, dict[str, Any]]:
        """Where the loop is, and the random states of its epoch: within the epoch, or at the start of the next one;
        there always, if not `is_mid_epoch`."""
        epoch = self.standing
        if epoch is not None and not epoch.iteration.is_complete and is_mid_epoch:
            return epoch.cursor, self._state_of(epoch)
        at = self.begins_at
        return at, self._restored_rngs if at.is_within else {"seed": self.seed, **self._now()}

    def _state_of(self, epoch: Epoch) -> dict[str, Any]:
        rngs = epoch.rngs
        begun = self._by_name(rngs.begun or rngs.start or [])
        state = {"seed": epoch.seed, **begun}
        if not self.is_shared:
            return state | {"ahead": epoch.num_fetched, "following": self._now()}
        is_settled = epoch.counted and self._unsettled is not epoch
        following = self._now()
        if not is_settled:
            states = rngs.states if self._is_complete(epoch) else self._seeded(epoch.number + 1)
            following |= self._by_name(states) if rngs.follows else {"generators": rngs.own_states}
        return state | {"ahead": 0, "following": following, "follows": rngs.follows}

    def _now(self) -> dict[str, Any]:
        """The states from which the next epoch is drawn."""
        if self.shared is None:
            process = {name: rng.read() for name, rng in self.process.items()}
            return {"process": process, "generators": read_all(self.own)}
        states, written = self._source or self.shared.states, self.shared.written
        process = {name: states[name] for name in self.process}
        return {"process": process, "generators": read_all(self.own), "written": dict(written)}

    def resume(self, at: Cursor, state: dict[str, Any]) -> None:
        """Make the next iteration begin at a position, with the random states of its epoch."""
        self.epoch = self._next = at.epoch
        self.restored, self._restored_rngs = at, state
        self.latest = self.standing = self._unsettled = None
        self._num_begun += 1
        following = state.get("following", state)
        if self.shared is not None:
            self.seed = state["seed"]
            process = {name: following["process"].get(name, self.shared.states[name]) for name in self.process}
            if self.is_alone:
                self._chain, self._chain_at = process, self.shared.agreed
            else:
                self.shared.agree(process, following.get("written"))
        write_all(self.own, (state if self.is_shared else following)["generators"])

    def leave_restored(self) -> None:
        """Make the next epoch follow the restored one, which is at its end."""
        assert self.restored is not None
        self.epoch += 1
        self.restored = replace(self.restored, epoch=self.epoch, batches=0, samples=0, start=0)

    @property
    def _source(self) -> Mapping[str, Any] | None:
        """The states from which the next epoch is drawn, if this loader has states of its own."""
        if self.shared is None or not self.is_alone:
            return None
        return self._chain if self._chain_at is self.shared.agreed else self.shared.agreed

    def _new(self) -> Epoch:
        self.settle()
        if self.latest is not None and not self.latest.counted:
            self.latest.rngs.undo()
        restored, following = self.restored, self._restored_rngs.get("following")
        if restored is not None and restored.epoch != self.epoch:
            self.restored, self._next = self.begins_at, restored.epoch
            if self.shared is not None and following is not None:
                self._next += 1
                write_all(self.own, following["generators"])
        return self._epoch(self.begins_at)

    def _chosen(self) -> dict[str, Any]:
        """The states from which an epoch other than the next one is drawn."""
        if self.epoch == 0:
            return {name: self._first[name] for name in self.process}
        return dict(zip(self.process, self._seeded(self.epoch), strict=False))

    def _seeded(self, number: int) -> list[Any]:
        """The states of all generators, seeded by the number of an epoch."""
        rngs = [*self.process.values(), *self.own]
        with preserved_rngs(self.own):
            for rng in rngs:
                rng.seed(mix(self.seed, number))
            return read_all(rngs)

    def _epoch(self, begun_at: Cursor, *, is_peek: bool = False) -> Epoch:
        process, shared = self.process, self.shared
        resumed = self._restored_rngs if begun_at.is_within else None
        start: list[Any] | None = None
        begun: list[Any] | None = None
        seed = None if shared is None else self.seed
        if resumed is not None:
            saved = resumed["process"]
            states = (saved[name] if name in saved else rng.read() for name, rng in process.items())
            start = begun = [*states, *resumed["generators"]]
            seed = resumed["seed"]
            if shared is None:
                self._go_on_in_one_process(resumed["following"])
        elif shared is None and self.keeps_workers and self.epoch > 0:
            # a resumed run starts workers, and torch draws their seed
            begun = read_all([*process.values(), *self.own])
        source, lead = self._source, None if self.lead is None else self._of_rank_zero
        if shared is not None and resumed is None and self.epoch != self._next:
            source, lead, self._next = self._chosen(), None, self.epoch
            if self.lead is not None:
                shared.agree(source, {})
                source = shared.states
        if shared is not None and is_peek:
            source, lead = {**shared.states}, None
        follows = resumed is not None and resumed.get("follows", True)
        rngs = EpochRngs(process, self.own, start, begun, shared, source, lead, follows)
        ahead = 0 if resumed is None else resumed.get("ahead", 0)
        of_rank = torch.initial_seed() + self.rank if self.is_shared else 0
        return Epoch(begun_at, rngs, seed, of_rank, self.seed_workers, ahead)

    def _of_rank_zero(self, states: dict[str, Any]) -> dict[str, Any]:
        """The states of rank 0 at the first draw of this epoch; of this rank, if the program has one loader. The same
        ones each time, until the epoch is counted."""
        assert self.shared is not None
        assert self.lead is not None
        name = f"{self._number}/{self.shared.num_loaders}/{self._num_begun}"
        if self._led[0] != name:
            self._led = name, states if self.shared.num_loaders == 1 else self.lead(name, states)
        return self._led[1]

    def _go_on_in_one_process(self, following: Mapping[str, Any]) -> None:
        """Move the generators on to where several ranks would have moved them, unless they were used since."""
        for name, written in following.get("written", {}).items():
            if name in self.process and digest(self.process[name].read()).hex() == written:
                self.process[name].write(following["process"][name])
