"""Where the loop is in a loader: a `Cursor`, and the `Iteration` that advances it with each batch the loop receives.

`DeviceLoader.__iter__` begins an iteration at `Order.begins_at`, and `Epoch.cursor` is the position after the batches
that its iteration has counted. A checkpoint has the cursor, and a resumed run begins its next iteration there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, Literal, final

from fabric.strategies.data.loop_progress import LoopProgress, RepeatedBatches
from fabric.strategies.data.uneven import Supply


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The epoch, and the position within it."""

    epoch: int = 0
    start: int = 0
    """Samples of the order that were read by earlier runs with another number of samples per step."""
    batches: int = 0
    """Batches that the loop has received after these samples, on each rank."""
    samples: int = 0
    """Samples that all ranks together have received, `start` included."""
    first: Sequence[int] = ()
    """The first samples of the order, by which a resumed run finds that its order differs."""
    only_repeats: bool = False
    """Whether this rank has no batch of its own left, and repeats its last one while other ranks go on."""
    left: Literal["end", "early"] | None = None
    """Where a loader that saves its own position has left the epoch that is over: at the end of this rank's data, or
    earlier. None: the loader is within the epoch of this cursor, or saves no position."""

    @property
    def is_within(self) -> bool:
        """Whether samples of the epoch have been read."""
        return self.samples > 0 or self.batches > 0

    @property
    def is_at_end(self) -> bool:
        """Whether the loop has received all batches of the epoch, and has not asked for another one."""
        return self.left is not None and self.is_within

    def at_start(self) -> "Cursor":
        """At the first sample of the epoch."""
        return Cursor(epoch=self.epoch)

    def in_other_rounds(self, num_ranks: int) -> "Cursor":
        """At the same batch of a stream of batches, of which `num_ranks` ranks have read one each; `start` has their
        number."""
        start = self.start + self.batches * num_ranks
        return replace(self, start=start, batches=0, samples=max(self.samples, start))

    def in_epoch(self, epoch: int) -> "Cursor":
        """The same position, if that is its epoch; otherwise the start of the epoch, for which the loader is left."""
        return self if epoch == self.epoch else Cursor(epoch=epoch, left=self.left or "early")


@final
@dataclass(eq=False)
class Iteration:
    """How many batches the loop has received in one iteration over a loader, and which of them were repeated."""

    progress: LoopProgress = field(default_factory=LoopProgress)
    trains: bool = False
    """Whether the loop trains on the batches."""
    supply: Supply | None = None
    """If ranks agree on the number of batches."""
    num_batches: int = 0
    asked_ns: int = 0
    """When the loop has asked for the latest batch (`time.time_ns`), while a check receives them."""
    is_complete: bool = False
    """Whether the iteration has raised StopIteration in the loop."""
    has_ended: bool = False
    """Whether the iteration has no batch left. It may still be open, if the end was found by reading ahead."""
    is_open: bool = False
    """Whether the loop has received a batch, and has not left the iteration."""
    has_trained: bool = False
    """Whether there was a backward pass or an optimizer step, once the loop has left the iteration."""
    thread: int | None = None
    """The thread that receives the batches."""
    begin_again: Callable[[], Iterator[Any]] | None = None
    """Begins the iteration that replaces this one, if a position was loaded after `iter`."""
    _num_updates_before: int = 0

    def __post_init__(self) -> None:
        self.repeated = self.progress.repeated if self.trains else RepeatedBatches()

    @property
    def num_own(self) -> int:
        """Number of batches received, without repeated ones."""
        return self.num_batches if self.supply is None else min(self.num_batches, self.supply.num_read)

    @property
    def is_left(self) -> bool:
        """Whether the loop has left the iteration before its end."""
        return self.num_batches > 0 and not self.is_open and not self.is_complete

    @property
    def repeats(self) -> bool:
        """Whether the latest batch was a repeated one."""
        return self.num_own < self.num_batches

    @property
    def only_repeats(self) -> bool:
        """Whether a run that resumes after the latest batch has no batch of its own left in this epoch."""
        supply = None if self.is_complete else self.supply
        has_next = supply is None or self.num_batches < supply.num_read
        return supply is not None and not has_next and supply.ended and supply.last is not None

    @property
    def has_rest(self) -> bool:
        """Whether this rank's data had not ended when the iteration did."""
        return self.supply is not None and not self.supply.ended

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context: the loop receives batches, until it leaves the iteration or `end` is called."""
        self.is_open, self._num_updates_before = True, self.progress.num_updates
        self.thread = get_ident()
        try:
            yield
        finally:
            if not self.has_ended:
                self._leave(False)
            self.repeated.end(self)

    def receive(self, batch: Any) -> None:
        """Report a batch that the loop receives. Called where ranks agree, one is repeated, or a check wants it."""
        if self.trains and self.progress.note_batch is not None:
            self.progress.note_batch(batch, self)
        factor = 1.0 if self.supply is None else self.supply.factors.popleft()
        if self.repeated.is_used:
            self.repeated.receive(self, factor)

    def end(self) -> None:
        """Called when there is no batch left."""
        self.has_ended = True
        self.progress.end(self._leave)

    def without_batches(self) -> Iterator[Any]:
        """An iteration whose batches the loop has received in the saved run."""
        with self.opened():
            yield from ()
            self.end()

    def _leave(self, is_complete: bool) -> None:
        self.is_open, self.is_complete = False, is_complete
        self.has_trained = self.progress.num_updates != self._num_updates_before
