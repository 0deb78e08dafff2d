"""The prepared loader that `setup_dataloaders` returns: this rank's batches, on this rank's device."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from threading import get_ident
from time import time_ns
from typing import Any, Protocol, final, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset, Sampler

from fabric.strategies.data import huggingface
from fabric.strategies.data.context import LoaderContext
from fabric.strategies.data.cursor import Cursor, Iteration
from fabric.strategies.data.epochs import Epoch, Order
from fabric.strategies.data.partition import BatchCut, Cut, SampleCut, Share, length_of
from fabric.strategies.data.rng import preserved_rngs
from fabric.strategies.data.sources import IndexSource, PreparedStream
from fabric.strategies.data.transfer import Carry, one_by_one
from fabric.strategies.data.uneven import Agreement
from fabric.strategies.data.workers import WorkerStart


@runtime_checkable
class SupportsSetEpoch(Protocol):
    """A sampler, dataset or loader with `set_epoch`."""

    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class Resumable(Protocol):
    """A loader that can save and restore its position, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def own_position(loader: Iterable[Any]) -> Resumable | None:
    """The loader, if it saves its own position; None if its batches are counted instead.

    The batches of torchdata's `StatefulDataLoader` are counted over map-style data, whose order is known, and over a
    stream without a state: torchdata 0.11 counts the batches before a restored position of such a stream twice, so that
    a second resume in the same epoch would lose samples.
    """
    if not isinstance(loader, Resumable):
        return None
    if not isinstance(loader, DataLoader):
        return loader
    saves = isinstance(loader.dataset, IterableDataset) and isinstance(loader.dataset, Resumable)
    return loader if saves and not huggingface.loses_samples(loader.dataset) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a prepared loader reads the user's loader."""

    source: Iterable[Any]
    """The iterated object: the user's loader, a copy of it, or this rank's share of an iterable."""
    order: Order = field(default_factory=Order)
    """The epochs, and the order of their samples."""
    index: IndexSource | None = None
    """Replaces the sampler, if the loader has one."""
    stream: PreparedStream | None = None
    """Replaces an iterable dataset."""
    announce: Callable[[Epoch], None] | None = None
    """Called with each epoch, before workers begin it."""
    epochal: tuple[SupportsSetEpoch, ...] = ()
    """The objects whose `set_epoch` the prepared loader's `set_epoch` calls."""
    carry: Carry = one_by_one
    """Moves batches to the device."""
    begin: tuple[Callable[[], None], ...] = ()
    """Called before each iteration."""
    position: Resumable | None = None
    """The loader that saves its own position; None: batches are counted here."""
    agreement: Agreement | None = None
    """Gives ranks whose data has different lengths the same number of batches."""
    part: Share | None = None
    """Which part of the data this rank reads, if each rank has a position of its own; None: all share one position."""

    @property
    def cut(self) -> Cut:
        """How the order is divided into batches."""
        return next((each.cut for each in (self.index, self.stream) if each is not None and each.cut), _WHOLE)


def loader_name(loader: object) -> str:
    """The type of the user's loader, prepared or not."""
    return type(loader._loader if isinstance(loader, DeviceLoader) else loader).__name__


@final
class DeviceLoader:
    """This rank's share of a loader's batches, on this rank's device. Saves and restores its position.

    Delegates other attributes to the user's loader (`dataset`, `batch_size`, `sampler`, ...), which is not modified.
    """

    def __init__(self, loader: Iterable[Any], reading: Reading, context: LoaderContext) -> None:
        self._loader, self._reading, self._context = loader, reading, context
        self._has_begun = self._has_warned = False
        self._restored: Any = None
        """The restored state of a loader that saves its own position."""
        self._epoch: int | None = None
        """The number that was passed to `set_epoch`, here or in the saved run."""
        self._told_before: list[int | None] = []
        """`_told` when the latest iteration began."""
        self.iteration = Iteration()
        """The latest iteration."""
        self._begun_at = Cursor()
        """Where the latest iteration began."""
        self.numbers_samplers = False
        """Whether each iteration passes its number to the user's sampler (`set_epoch`), which torch leaves to the
        loop."""

    def seed_workers_by_rank(self, rank: int) -> None:
        """Seed workers over a map-style dataset differently on each rank, although the ranks' generators are alike."""
        self._reading.order.rank = rank

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. It is counted at its second batch, its end, or a backward pass, whichever comes first."""
        reading, order, position = self._reading, self._reading.order, self._reading.position
        asked_ns = time_ns()
        self._has_begun, self._told_before, at = True, self._told, order.begins_at
        if at.is_at_end:
            order.leave_restored()
            self.iteration = Iteration()
            return self.iteration.without_batches()
        resumes = position is not None and order.restored is not None
        if resumes and position is not None:
            position.load_state_dict(self._restored)
        for begin in reading.begin:
            begin()
        if resumes and at.left is not None:
            self._leave_rest(at)
            resumes = False
        if self.numbers_samplers:
            for part in reading.epochal:
                if isinstance(part, Sampler):
                    part.set_epoch(order.epoch)
        # A resumed loader draws its seeds again, which the saved run had drawn when the epoch began.
        with preserved_rngs() if resumes else nullcontext(), order.opening() as opened:
            if reading.announce is not None:
                reading.announce(opened)
            batches = self._begin()
        self._begun_at = opened.begun_at
        if reading.index is None and position is None and at.batches:
            batches = chain.from_iterable(self._after(opened, batches))
        supply = None
        if at.only_repeats and position is not None:
            with preserved_rngs():
                next(batches, None)  # datasets may use their state up at the first item only
        if reading.agreement is not None:
            supply, batches = reading.agreement(batches, self._example, has_ended=at.only_repeats)
            if reading.agreement.repeats and self._context.trains:
                self._context.progress.repeated.begin()
        self.iteration = Iteration(self._context.progress, self._context.trains, supply)
        self.iteration.asked_ns = asked_ns  # workers have started since
        if self._context.device.type != "cpu":
            batches = reading.carry(batches, self._context.device)
        return self._received(batches, self.iteration, opened)

    def __len__(self) -> int:
        """The number of this rank's batches. TypeError where the user's loader has no length."""
        reading = self._reading
        if reading.stream is not None:
            return reading.cut.length(len(reading.stream))
        return len(reading.source if reading.index is None else reading.index)  # type: ignore[arg-type]

    @property
    def num_batches_at_start(self) -> int | None:
        """How many batches the latest iteration had at its start: fewer than `len(self)` if it resumed an epoch. None:
        not known."""
        num_batches, at, reading = length_of(self), self._begun_at, self._reading
        if num_batches is None or (at.is_within and reading.position is not None):
            return None
        if not at.start:
            return num_batches - at.batches
        num_items = None if reading.index is None else length_of(reading.index.items)
        return reading.cut.length(num_items - at.start) - at.batches if num_items is not None else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._loader!r})"

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`, here and in the user's sampler and dataset, if they have `set_epoch`.

        Ranks: all call it, with the same number. Without it epochs are counted from 0.
        """
        self._epoch = epoch
        if not self.iteration.is_open:
            self.iteration.thread = None
        self._reading.order.epoch = epoch
        for part in self._reading.epochal:
            part.set_epoch(epoch)

    @property
    def reads_own_part(self) -> bool:
        """Whether this rank has a position of its own."""
        return self._reading.part is not None

    @property
    def is_of_other_thread(self) -> bool:
        """Whether another thread than this one has read the latest batch: perhaps ahead of the loop."""
        return self._context.resumes_left and self.iteration.thread not in (None, get_ident())

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop: the epoch, its order, and the number of batches that the loop has received.

        In the body of the loop, and after `break`, the position is within the epoch; after the last batch, and after
        `break` with `use="validate"` or "test", it is the start of the next epoch. Batches that workers have prefetched
        are not counted. With `in_order=False` the position is the start of its epoch. The state also has the epochs of
        the user's sampler and dataset: set by `set_epoch`, or by the program if their attribute `epoch` shows it.
        Raises: RuntimeError: another thread than this one iterates, or has iterated.
        """
        if self.is_of_other_thread:
            raise RuntimeError(f"The position of this `{loader_name(self)}` is not known. {OTHER_THREAD}")
        is_restored = self._reading.order.is_restored
        return self._state(self._context.resumes_left or is_restored or not self.iteration.is_left)

    def state_of_run(self) -> dict[str, Any]:
        """As `state_dict`, for a checkpoint whose state does not name the loader: the position of an iteration without
        training that the loop has left, such as an evaluation of some batches, is at the start of the next epoch."""
        if not self._reading.order.is_restored and self.iteration.is_left and not self.iteration.has_trained:
            return self._state(False)
        return self.state_dict()

    def _state(self, is_mid_epoch: bool) -> dict[str, Any]:
        """`is_mid_epoch`: otherwise the epoch of the latest iteration is over."""
        reading, iteration = self._reading, self.iteration
        at, rngs = reading.order.position(is_mid_epoch=is_mid_epoch)
        if not getattr(self._loader, "in_order", True):  # which batches the loop has received is not known
            at = at.at_start()
        state: dict[str, Any] = {"order": rngs, "cut": self._cut()}
        if reading.position is not None and reading.order.is_restored:
            state["loader"] = self._restored
        elif reading.position is not None:
            if not is_mid_epoch or iteration.is_complete or (iteration.has_ended and iteration.is_open):
                at = replace(at, left="early" if iteration.has_rest or not is_mid_epoch else "end")
            state["loader"] = reading.position.state_dict()
        if reading.part is not None:
            state["part"] = [reading.part.index, reading.part.count]
        else:
            at = replace(at, only_repeats=False)  # other ranks, which have this position as well, may have batches left
        is_within = is_mid_epoch and (iteration.is_open or iteration.is_left)
        return state | {"cursor": asdict(at), "told": self._told_before if is_within else self._told}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict` was called: the next iteration yields the remaining batches of the epoch.

        Skipped samples are not loaded: their indices are drawn and dropped, and a loader with a state of its own
        (torchdata's `StatefulDataLoader`) loads its state. An iterable dataset without a state is read again up to the
        position. With another number of ranks the order of samples continues, if single samples are distributed.
        Raises: ValueError: the state is of a loader of another kind, over other data, or with other batches per step.
        """
        at, self._restored = self.fitting(state_dict), state_dict.get("loader")
        self._reading.order.resume(at, state_dict["order"])
        self._epoch, *told = state_dict["told"]
        for part, epoch in zip(self._reading.epochal, told, strict=False):
            if epoch is not None:
                part.set_epoch(epoch)
        if not self.iteration.is_open:
            self.iteration.begin_again = self.__iter__
            self.iteration = Iteration()

    def fitting(self, state_dict: dict[str, Any]) -> Cursor:
        """The position that `load_state_dict` would restore. Changes nothing.

        Raises: ValueError: as `load_state_dict`.
        """
        part, order = self._reading.part, self._reading.order
        if not {*state_dict, *state_dict.get("order", ())} >= _ENTRIES:
            raise ValueError(
                "The checkpoint has the position of a loader as another version of torchfabric writes it. Leave the "
                "loader out of the state that is loaded: its epoch then starts from the beginning."
            )
        saved = {name: name in state_dict for name in ("loader", "part")}
        here = {"loader": self._reading.position is not None, "part": part is not None}
        if saved != here or len(state_dict["order"]["generators"]) != len(order.own):
            raise ValueError(
                f"The state of a loader that reads {_ways(saved)} was given to one that reads {_ways(here)}. Load it "
                "into the same kind of loader and sampler, over the same data, with the same number of ranks."
            )
        if part is not None and state_dict["part"] != [part.index, part.count]:
            index, count = state_dict["part"]
            raise ValueError(
                f"The state of a loader that reads part {index} of {count} was given to rank {part.index} of "
                f"{part.count}, which reads another part. Load this rank's own state, in a world of the same size."
            )
        at = self._recut(Cursor(**state_dict["cursor"]), state_dict["cut"])
        # A loader that resumes at its own position is counted from there.
        return at if self._reading.position is None else replace(at, start=at.samples, first=())

    @property
    def _told(self) -> list[int | None]:
        """The number that was passed to `set_epoch`; the epochs of the user's sampler and dataset: their attribute
        `epoch`, which the program may have set, or else that number."""
        epochs = [getattr(part, "epoch", None) for part in self._reading.epochal]
        return [self._epoch, *(epoch if isinstance(epoch, int) else self._epoch for epoch in epochs)]

    @property
    def would_start(self) -> bool:
        """Whether `state_dict` would start the user's loader and its workers: torchdata's starts when it is asked."""
        return self._reading.position is not None and not self._has_begun and not self._reading.order.is_restored

    def _cut(self) -> dict[str, int | None]:
        """How the order is divided into steps; `step`: number of items in each."""
        index, cut = self._reading.index, self._reading.cut
        items = (
            getattr(self._loader, "dataset", None) if index is None or not isinstance(cut, SampleCut) else index.items
        )
        return {"ranks": cut.share.count, "step": cut.reads[1], "items": length_of(items)}

    def _recut(self, at: Cursor, saved: dict[str, int | None]) -> Cursor:
        """The saved position, in steps of this loader. Raises ValueError if no step ends there."""
        here, name = self._cut(), type(self._loader).__name__
        if None not in (saved["items"], here["items"]) and saved["items"] != here["items"]:
            raise ValueError(
                f"The checkpoint has the position of a loader over {saved['items']} samples, and this `{name}` has "
                f"{here['items']}. Load it into a loader over the same data, or leave it out of the state."
            )
        if saved == here:
            return at
        if self._reading.index is not None and self._reading.position is None:
            return replace(at, start=at.samples, batches=0)  # steps begin at any sample
        if saved["step"] != here["step"]:
            if isinstance(self._reading.cut, BatchCut):  # whole batches of a stream
                return at.in_other_rounds(saved["ranks"] or 1)
            raise ValueError(
                f"The checkpoint has the position of a loader that read {saved['step']} samples per step on "
                f"{saved['ranks']} ranks, and this `{name}` reads {here['step']} on {here['ranks']}. A stream resumes "
                "only with steps of the same size: choose a `batch_size` with which all ranks together read as many."
            )
        return at

    def _begin(self) -> Iterator[Any]:
        start = getattr(self._reading.source, "worker_init_fn", None)
        with start.starting() if isinstance(start, WorkerStart) else nullcontext():
            return iter(self._reading.source)

    def _leave_rest(self, at: Cursor) -> None:
        """Leave the epoch in which the user's loader was restored, so that the next one follows."""
        position = self._reading.position
        assert position is not None
        with preserved_rngs():  # what the saved run had drawn when it began the epoch
            if at.left == "early" or isinstance(position, DataLoader):
                next(self._begin(), None)  # datasets may use their state up at the first item only
            else:  # the loader restores its end; `iter` begins the next epoch
                position.state_dict()
        if self._epoch is not None:  # the restored state may have another
            for part in self._reading.epochal:
                part.set_epoch(self._epoch)

    def _after(self, opened: Epoch, batches: Iterator[Any]) -> Iterator[Iterator[Any]]:
        """The batches of a stream after the position at which the epoch is resumed."""
        for _ in islice(batches, opened.begun_at.batches):
            pass
        if not self._reading.order.is_shared:
            opened.rngs.release()
        yield batches

    def _example(self) -> Any:
        """A batch of this rank's data, from the beginning of an epoch; None if there is none. Changes no position."""
        with self._reading.order.peeking():
            batch = next(self._begin(), None)
            # A loader with a state restores its end, and begins the next epoch then.
            return next(self._begin(), None) if batch is None and self._reading.position is not None else batch

    def _received(self, batches: Iterator[Any], iteration: Iteration, opened: Epoch) -> Iterator[Any]:
        """Yield the batches, and advance the position with each."""
        order, index, progress = self._reading.order, self._reading.index, self._context.progress
        if iteration.begin_again is not None:
            del batches  # whose workers end
            yield from iteration.begin_again()
            return
        supply, repeated = iteration.supply, iteration.repeated
        with iteration.opened():
            first = list(islice(batches, 1))
            epoch, before = self._read_epoch(opened), order.standing
            if index is not None and not index.read and epoch.begun_at.batches:  # no sampler was read, nothing skipped
                first = list(islice(batches, epoch.begun_at.batches - 1, epoch.begun_at.batches))
            batches, first = chain(first, batches), []  # not kept: a batch may be large
            num_backwards, num_unweighted = progress.num_backwards, progress.num_unweighted
            epoch.iteration = iteration
            try:
                for batch in batches:
                    if iteration.num_batches == 1:
                        order.count(epoch)  # the loop asked for a second batch: this was not `next(iter(loader))`
                    order.standing = epoch
                    iteration.num_batches += 1
                    if supply is not None or repeated.is_used or progress.note_batch is not None:
                        iteration.receive(batch)
                    yield batch
                    if progress.note_batch is not None:
                        iteration.asked_ns = time_ns()
                is_biased = epoch.has_unequal and progress.num_unweighted != num_unweighted
                if is_biased and index is not None and not index.cut.uneven and not self._has_warned:
                    self._has_warned = True
                    self._context.report(_UNEQUAL.format(name=loader_name(self)))
                order.count(epoch)
                iteration.end()
            finally:
                if progress.num_backwards != num_backwards:
                    order.count(epoch)
                order.leave(epoch)
                if not epoch.counted and order.standing is epoch:
                    order.standing = before

    def _read_epoch(self, opened: Epoch) -> Epoch:
        """The epoch of the batches: a loader may start it at the first batch, or may have started it earlier."""
        index, order = self._reading.index, self._reading.order
        if index is None or opened.drawn is not None:
            return opened
        if not index.read and index.cut.share.count == 1:
            return opened
        if not index.read or order.latest is None:
            raise TypeError(
                f"`{type(self._loader).__name__}` yields batches without reading its sampler, so every rank would get "
                "all of them. Call `super().__iter__()` in its `__iter__`, or pass `use_distributed_sampler=False` "
                "and distribute the batches over the ranks yourself."
            )
        return order.latest


_WHOLE = SampleCut(share=Share(), uneven=True)
_ENTRIES = {"cursor", "cut", "told", "order", "seed", "process", "generators"}
"""What the state of a loader has."""
OTHER_THREAD = (
    "A thread of the program reads it, perhaps ahead of the loop. Let workers read ahead: pass `num_workers=2` to "
    "`DataLoader`. Or call `loader.state_dict()` in that thread after each batch, pass it on, and save the state that "
    "came with the batch trained on last. Between epochs, call `loader.set_epoch(next_epoch)` before the save."
)
_UNEQUAL = (
    "A batch of the `{name}` had different numbers of samples on the ranks, as the last of an epoch may have, and "
    "`fabric.backward(loss)` averages over ranks: a mean over the batch counts samples of a smaller batch more. Write "
    "`fabric.backward(loss * len(x), weight=len(x))`, which is exact, or pass `drop_last=True`. This is reported once."
)


def _ways(kinds: dict[str, bool]) -> str:
    whose = "one of several parts" if kinds["part"] else "one order for all ranks"
    return f"{whose}{', with a state of its own' if kinds['loader'] else ''}"
