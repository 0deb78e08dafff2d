"""What the user iterates: a loader's batches, this rank's share of them, on this rank's device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch

from fabric.strategies.data.batch_sampler import IndexSource
from fabric.strategies.data.epochs import Epoch, Order
from fabric.strategies.data.iterable import SharedStream, without_left_out
from fabric.strategies.data.share import Share
from fabric.strategies.data.transfer import Carry, one_by_one
from fabric.strategies.data.uneven import Agreement
from fabric.strategies.data.workers import WorkerStart

END = object()


@runtime_checkable
class Stateful(Protocol):
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
    begin: Callable[[], None] = lambda: None
    """Called before each iteration."""
    position: Iterable[Any] | None = None
    """What knows how far an iteration has come, where that is not `source`."""
    agreement: Agreement | None = None
    """How ranks that read data of different lengths come to the same number of batches."""
    part: Share | None = None
    """Where each rank reads other data than its peers, so that it stands at a position of its own: which part."""


def read_as(loader: Iterable[Any], reading: Reading) -> DeviceLoader:
    """The loader, read in this way; it has a state exactly where what it reads has one."""
    stateful = isinstance(reading.source if reading.position is None else reading.position, Stateful)
    return StatefulDeviceLoader(loader, reading) if stateful else StatelessDeviceLoader(loader, reading)


def loader_name(loader: object) -> str:
    """The type of the user's loader, prepared or not."""
    return type(loader._loader if isinstance(loader, DeviceLoader) else loader).__name__


class DeviceLoader(ABC):
    """A loader's batches: this rank's share of them, on this rank's device.

    Delegates other attributes to the user's loader (`dataset`, `batch_size`, `sampler`, ...), which is left as it was.
    """

    def __init__(self, loader: Iterable[Any], reading: Reading) -> None:
        self._loader, self._reading = loader, reading

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. It counts once it has ended or has yielded a second batch."""
        reading = self._reading
        reading.begin()
        if reading.start is not None:
            reading.start.starting()
        with reading.order.opening() if reading.order is not None else nullcontext() as opened:
            if reading.stream is not None and opened is not None:
                reading.stream.announce(opened.number)
            batches = iter(reading.source)
        if reading.stream is not None:
            batches = without_left_out(batches, reading.leave_out)
        if reading.agreement is not None:
            batches = reading.agreement(batches, again=lambda: iter(reading.source))
        if reading.device is not None and reading.device.type != "cpu":
            batches = reading.carry(batches, reading.device)
        if reading.order is None or opened is None:
            return batches
        return self._counted(batches, reading.order, opened)

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
                f"`{name}` of a prepared `{type(self._loader).__name__}`: it does not know its position. Use "
                "torchdata's `StatefulDataLoader`."
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

    def _counted(self, batches: Iterator[Any], order: Order, opened: Epoch) -> Iterator[Any]:
        first = next(batches, END)
        epoch = self._read_epoch(order, opened)
        try:
            if first is not END:
                yield first
                second = next(batches, END)
                order.count(epoch)
                if second is not END:
                    yield second
                    yield from batches
            order.count(epoch)
            epoch.over = True
        finally:
            if epoch.counted:
                order.settle()

    def _read_epoch(self, order: Order, opened: Epoch) -> Epoch:
        """The epoch that the batches come from: a loader may begin it late, or may have begun it before."""
        index = self._reading.index
        if index is None or opened.drawn is not None:
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
    """A `DeviceLoader` whose user's loader does not know its position."""

    def __repr__(self) -> str:
        return f"StatelessDeviceLoader({self._loader!r})"


@final
class StatefulDeviceLoader(DeviceLoader):
    """A `DeviceLoader` whose user's loader knows its position."""

    def __repr__(self) -> str:
        return f"StatefulDeviceLoader({self._loader!r})"

    @property
    def reads_own_part(self) -> bool:
        """Whether the position is that of this rank alone."""
        return self._reading.part is not None

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, and the order in which it stands."""
        state: dict[str, Any] = self._stateful.state_dict()
        if self._reading.order is not None:
            return {"loader": state, "order": self._reading.order.state_dict()}
        part = self._reading.part
        return state if part is None else {"loader": state, "part": [part.index, part.count]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on, at the next iteration, where `state_dict` was taken, in a world of the same size.

        Raises: ValueError: it is the position in another part of the data than the one that this rank reads.
        """
        order, part = self._reading.order, self._reading.part
        saved = next((way for way in ("order", "part") if set(state_dict) == {"loader", way}), "all")
        here = "order" if order is not None else "all" if part is None else "part"
        if saved != here:
            ways = {"order": "one order for many ranks", "part": "one of several parts", "all": "all of the data"}
            raise ValueError(
                f"The state of a loader that reads {ways[saved]} was given to one that reads {ways[here]}. Load it "
                "where as many ranks read the same data."
            )
        if part is not None:
            index, count = state_dict["part"]
            if (index, count) != (part.index, part.count):
                raise ValueError(
                    f"The state of a loader that reads part {index} of {count} was given to rank {part.index} of "
                    f"{part.count}, which reads another part. Load the state that this rank saved, in a world of the "
                    "same size."
                )
        if order is not None:
            order.load_state_dict(state_dict["order"])
        self._stateful.load_state_dict(state_dict if order is None and part is None else state_dict["loader"])

    @property
    def _stateful(self) -> Stateful:
        stateful = self._reading.source if self._reading.position is None else self._reading.position
        assert isinstance(stateful, Stateful)  # see `read_as`
        return stateful
