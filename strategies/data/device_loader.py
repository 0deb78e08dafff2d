"""What the user iterates: a loader's batches, this rank's share of them, on this rank's device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch.utils.data import DataLoader

from fabric.strategies.data.batch_sampler import IndexSource
from fabric.strategies.data.epochs import Epoch, Order, Position
from fabric.strategies.data.iterable import SharedStream, without_left_out
from fabric.strategies.data.loader_check import length_of
from fabric.strategies.data.rng import put_back
from fabric.strategies.data.share import Share
from fabric.strategies.data.transfer import Carry, one_by_one
from fabric.strategies.data.uneven import Agreement
from fabric.strategies.data.workers import WorkerStart

END = object()


@runtime_checkable
class Resumable(Protocol):
    """A loader that knows its position, as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@runtime_checkable
class Epochal(Protocol):
    """A sampler or dataset that the user tells the number of the epoch."""

    def set_epoch(self, epoch: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a loader is read here."""

    source: Iterable[Any]
    """What is iterated: the user's loader, a copy of it, or our share of an iterable."""
    order: Order | None = None
    """The order that the ranks share; None where each rank reads in its own."""
    index: IndexSource | None = None
    """What stands in for the sampler, where the loader has one."""
    stream: SharedStream | None = None
    """What stands in for an iterable dataset."""
    start: WorkerStart | None = None
    epochal: tuple[Epochal, ...] = ()
    """Who is told the number of the epoch when the user says it."""
    device: torch.device | None = None
    """Where the batches go; None leaves them where they are."""
    carry: Carry = one_by_one
    """How batches go there."""
    leave_out: Callable[[int], None] = lambda num_items: None
    begin: tuple[Callable[[], None], ...] = ()
    """Called before each iteration."""
    position: Resumable | None = None
    """What knows how far an iteration has come by itself; else the loader counts."""
    agreement: Agreement | None = None
    """How ranks that read data of different lengths come to the same number of batches."""
    part: Share | None = None
    """Where each rank reads other data than its peers, so that it stands at a position of its own: which part."""
    rereads: bool = False
    """Whether the batches before the position are read again and dropped, because they cannot be skipped."""
    report: Callable[[str], None] = lambda sentence: None
    num_backwards: Callable[[], int] = lambda: 0
    """How often the loop has called backward."""
    num_unweighted: Callable[[], int] = lambda: 0
    """How often it has without a weight."""
    note: Callable[[], Callable[[Any, object], None] | None] = lambda: None
    """What is called with each batch that the loop receives, if anything."""
    draw_apart: Callable[[], None] = lambda: None
    """Lets ranks that read different data draw different random numbers; called before the loop gets a batch."""


@final
class Iteration:
    """What the loop has had of one iteration over a loader."""

    def __init__(self, num_read: Callable[[], int] | None = None) -> None:
        """`num_read`: how many batches this rank has read of its data, where it may repeat some after them."""
        self.num_batches = 0
        self.is_complete = False
        """Whether the loop has asked for a batch after the last."""
        self._num_read = num_read

    @property
    def num_own(self) -> int:
        """How many batches were no repetition."""
        return self.num_batches if self._num_read is None else min(self.num_batches, self._num_read())

    def follow(self, batches: Iterator[Any], note: Callable[[Any, object], None] | None = None) -> Iterator[Any]:
        """The batches, counted and noted."""
        for batch in batches:
            self.num_batches += 1
            if note is not None:
                note(batch, self)
            yield batch
        self.is_complete = True


def read_as(loader: Iterable[Any], reading: Reading) -> DeviceLoader:
    """The loader, read in this way; it has a state unless its batches come in any order."""
    unordered = isinstance(loader, DataLoader) and loader.num_workers > 0 and not getattr(loader, "in_order", True)
    return StatelessDeviceLoader(loader, reading) if unordered else StatefulDeviceLoader(loader, reading)


def loader_name(loader: object) -> str:
    """The type of the user's loader, prepared or not."""
    return type(loader._loader if isinstance(loader, DeviceLoader) else loader).__name__


class DeviceLoader(ABC):
    """A loader's batches: this rank's share of them, on this rank's device.

    Delegates other attributes to the user's loader (`dataset`, `batch_size`, `sampler`, ...), which is left as it was.
    """

    def __init__(self, loader: Iterable[Any], reading: Reading) -> None:
        self._loader, self._reading = loader, reading
        self._resumes = self._said_reread = self._said_unequal = False
        self.iteration = Iteration()
        """The one that was begun last."""

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. It counts once it has ended, has yielded a second batch, or the loop has called backward."""
        reading = self._reading
        for begin in reading.begin:
            begin()
        with reading.order.opening() if reading.order is not None else self._undrawn() as opened:
            if reading.stream is not None and reading.order is not None and opened is not None:
                reading.stream.announce(reading.order.seed, opened.number)
            batches = self._begin()
        if opened is not None and opened.begun_at.batches and reading.position is None and reading.rereads:
            self._say_reread()
        if reading.stream is not None:
            batches = without_left_out(batches, reading.leave_out)
            if opened is not None:
                batches = islice(batches, opened.begun_at.batches, None)
        self.iteration = Iteration()
        if reading.agreement is not None:
            batches, num_read = reading.agreement(batches, again=self._begin)
            self.iteration = Iteration(num_read)
        if reading.device is not None and reading.device.type != "cpu":
            batches = reading.carry(batches, reading.device)
        if reading.order is None or opened is None:
            reading.draw_apart()
            return self.iteration.follow(batches, reading.note())
        return self.iteration.follow(self._counted(batches, reading.order, opened), reading.note())

    def __len__(self) -> int:
        """The number of this rank's batches. TypeError where the user's loader has no length."""
        reading = self._reading
        if reading.stream is not None:
            return reading.stream.cut.length(len(reading.stream.dataset))  # type: ignore[arg-type]
        return len(reading.source if reading.index is None else reading.index)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(
                f"`{name}` of a prepared `{type(self._loader).__name__}`: with `in_order=False` it has no position. "
                "Leave `in_order` out."
            )
        return getattr(self._loader, name)

    @abstractmethod
    def __repr__(self) -> str: ...

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch `epoch`, for our order and for the user's sampler and dataset.

        Ranks: all call it, with the same number. Without it epochs count themselves, from 0.
        """
        if self._reading.order is not None:
            self._reading.order.epoch = epoch
        for part in self._reading.epochal:
            part.set_epoch(epoch)

    def _begin(self) -> Iterator[Any]:
        start = self._reading.start
        with nullcontext() if start is None else start.starting():
            return iter(self._reading.source)

    def _undrawn(self) -> AbstractContextManager[None]:
        # What a loader draws in order to go on, the run that was saved had drawn when its epoch began.
        resumes, self._resumes = self._resumes, False
        return put_back() if resumes else nullcontext()

    def _say_reread(self) -> None:
        if not self._said_reread:
            self._said_reread = True
            self._reading.report(
                f"The `{loader_name(self)}` cannot skip what was read before the checkpoint, so that it is read again. "
                "Streams with `state_dict` and `load_state_dict`, in torchdata's `StatefulDataLoader`, go on at once."
            )

    def _say_unequal(self) -> None:
        index = self._reading.index
        if not self._said_unequal and index is not None and not index.cut.uneven:
            self._said_unequal = True
            self._reading.report(
                f"A batch of the `{loader_name(self)}` had different numbers of samples on the ranks, as the last of "
                "an epoch may have, and `fabric.backward(loss)` averages over ranks: a mean over the batch "
                "counts samples of a smaller batch more. Write `fabric.backward(loss * len(x), weight=len(x))`, which "
                "is exact, or pass `drop_last=True`. This is said once."
            )

    def _counted(self, batches: Iterator[Any], order: Order, opened: Epoch) -> Iterator[Any]:
        batch = next(batches, END)
        epoch, before = self._read_epoch(order, opened), order.standing
        num_backwards = self._reading.num_backwards
        begun_after = num_backwards()
        index = self._reading.index
        if index is not None and not index.read and epoch.begun_at.batches:  # they were not skipped
            batch = next(islice(batches, epoch.begun_at.batches - 1, None), END)
        try:
            while batch is not END:
                order.receive(epoch)
                self._reading.draw_apart()
                num_unweighted = self._reading.num_unweighted()
                yield batch
                if epoch.is_unequal and self._reading.num_unweighted() != num_unweighted:
                    self._say_unequal()
                batch = next(batches, END)
                order.count(epoch)  # asked for another one, it was no peek
            order.count(epoch)
            epoch.over = True
        finally:
            if num_backwards() != begun_after:
                order.count(epoch)
            if epoch.counted:
                order.settle()
            elif order.standing is epoch:
                order.standing = before

    def _read_epoch(self, order: Order, opened: Epoch) -> Epoch:
        """The epoch that the batches come from: a loader may begin it late, or may have begun it before."""
        index = self._reading.index
        if index is None or opened.drawn is not None:
            return opened
        if not index.read and index.cut.share.count == 1:
            return opened
        if not index.read or order.latest is None:
            raise TypeError(
                f"`{type(self._loader).__name__}` yields batches without reading its sampler, so every rank would get "
                "all of them. Call `super().__iter__()` in its `__iter__`, or pass `use_distributed_sampler=False` "
                "and share the batches out yourself."
            )
        return order.latest


@final
class StatelessDeviceLoader(DeviceLoader):
    """A `DeviceLoader` whose batches come in any order."""

    def __repr__(self) -> str:
        return f"StatelessDeviceLoader({self._loader!r})"


@final
class StatefulDeviceLoader(DeviceLoader):
    """A `DeviceLoader` that knows its position."""

    def __repr__(self) -> str:
        return f"StatefulDeviceLoader({self._loader!r})"

    @property
    def reads_own_part(self) -> bool:
        """Whether the position is that of this rank alone."""
        return self._reading.part is not None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: the epoch, its order, and the batches that the loop has received of it.

        Within the body of the loop, and after `break`, that is in mid-epoch; after the end of the epoch, before the
        next one. What workers have fetched ahead does not count.
        """
        reading, state = self._reading, dict[str, Any]()
        if reading.position is not None:
            state["loader"] = reading.position.state_dict()
        if reading.order is not None:
            order = reading.order.state_dict()
            state["order"] = order if reading.position is None else order | asdict(Position())
            state["cut"] = self._cut()
        if reading.part is not None:
            state["part"] = [reading.part.index, reading.part.count]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on, at the next iteration, where `state_dict` was taken: the epoch yields the batches that are left.

        What is skipped is not loaded: indices are drawn and dropped, and what has a state of its own (torchdata's
        `StatefulDataLoader`) takes it. A stream without one is read again up to the position, and that is said once.
        Another number of ranks goes on in the same order of samples, where they are shared out one by one.
        Raises: ValueError: it is the position in other data, or in other steps where those cannot be told apart.
        """
        reading, part, order = self._reading, self._reading.part, self._reading.order
        saved, here = (
            {name: name in state for name in ("loader", "order", "part")} for state in (state_dict, self._kind())
        )
        if saved != here:
            raise ValueError(
                f"The state of a loader that reads {_ways(saved)} was given to one that reads {_ways(here)}. Load it "
                "where as many ranks read the same data through the same kind of loader."
            )
        if part is not None and state_dict["part"] != [part.index, part.count]:
            index, count = state_dict["part"]
            raise ValueError(
                f"The state of a loader that reads part {index} of {count} was given to rank {part.index} of "
                f"{part.count}, which reads another part. Load the state that this rank saved, in a world of the "
                "same size."
            )
        if order is not None:
            order.load_state_dict(self._recut(state_dict["order"], state_dict["cut"]))
        if reading.position is not None:
            reading.position.load_state_dict(state_dict["loader"])
        self._resumes = True

    def _kind(self) -> set[str]:
        reading = self._reading
        found = {"loader": reading.position, "order": reading.order, "part": reading.part}
        return {name for name, value in found.items() if value is not None}

    def _cut(self) -> dict[str, int | None]:
        """How the order is cut into steps; `step`: of how many items."""
        reading = self._reading
        cut = (reading.stream or reading.index).cut  # type: ignore[union-attr]  # an order has one of them
        items = reading.index.items if reading.index is not None and cut.keeps_samples else None
        return {"ranks": cut.share.count, "step": cut.reads[1], "items": length_of(items)}

    def _recut(self, order: dict[str, Any], saved: dict[str, int | None]) -> dict[str, Any]:
        """The position in steps of ours. Raises ValueError where it is none."""
        here, name = self._cut(), type(self._loader).__name__
        if None not in (saved["items"], here["items"]) and saved["items"] != here["items"]:
            raise ValueError(
                f"The checkpoint has the position of a loader over {saved['items']} samples, and this `{name}` has "
                f"{here['items']}. Load it into a loader over the same data, or leave it out of the state."
            )
        if saved == here:
            return order
        if self._reading.index is None or self._reading.position is not None:
            if saved["step"] != here["step"]:
                raise ValueError(
                    f"The checkpoint has the position of a loader that read {saved['step']} samples a step on "
                    f"{saved['ranks']} ranks, and this `{name}` reads {here['step']} on {here['ranks']}. A stream goes "
                    "on in steps of the same size alone: choose `batch_size` so that all ranks together read as many."
                )
            return order
        return order | asdict(Position(start=order["samples"], samples=order["samples"]))


def _ways(kinds: dict[str, bool]) -> str:
    whose = "one of several parts" if kinds["part"] else "one order for all ranks" if kinds["order"] else "all"
    return f"{whose}{', by a state of its own' if kinds['loader'] else ''}"
