"""One iteration over a prepared loader: how many batches the loop has received, and which of them were repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from fabric.strategies.data.loop_progress import LoaderNumbers
from fabric.strategies.data.positions import Tail
from fabric.strategies.data.repeated import RepeatedBatches
from fabric.strategies.data.uneven import Agreed


@final
class Iteration:
    """How many batches the loop has received in one iteration over a loader."""

    def __init__(
        self,
        agreed: Agreed | None = None,
        repeated: RepeatedBatches | None = None,
        numbers: LoaderNumbers | None = None,
        note: Callable[[Any, object], None] | None = None,
    ) -> None:
        """`agreed`: where ranks agree on the number of batches. `repeated`: receives each batch of the loop.
        `numbers`: what the loop has done so far, and where the end is reported. `note`: called with each batch, and
        this iteration."""
        self.num_batches = 0
        self.is_complete = False
        """Whether the iteration has raised StopIteration in the loop."""
        self.has_ended = False
        """Whether it has no batch left. Then it may be open, if its end was found by reading ahead."""
        self.is_open = False
        """Whether the loop has received a batch, and has not left the iteration."""
        self.has_trained = False
        """Whether there was a backward pass or an optimizer step, once the loop has left the iteration."""
        self.agreed, self._note = agreed, note
        self.repeated = RepeatedBatches() if repeated is None else repeated
        self._numbers = LoaderNumbers() if numbers is None else numbers
        self._num_updates_before = 0

    @property
    def num_own(self) -> int:
        """Number of batches received, without repeated ones."""
        return self.num_batches if self.agreed is None else min(self.num_batches, self.agreed.num_read)

    @property
    def is_left(self) -> bool:
        """Whether the loop has left the iteration before its end."""
        return self.num_batches > 0 and not self.is_open and not self.is_complete

    @property
    def repeats(self) -> bool:
        """Whether the latest batch was a repeated one."""
        return self.num_own < self.num_batches

    @property
    def next_repeats(self) -> bool:
        """Whether the batch that the loop receives next, and that is read already, is a repeated one."""
        return self.agreed is not None and self.num_batches >= self.agreed.num_read

    @property
    def tail(self) -> Tail:
        """What a run must know that resumes after the latest batch, if ranks repeat batches."""
        agreed = self.agreed
        if agreed is None or self.is_complete or self.num_batches < agreed.num_read:  # the next batch is read already
            return Tail()
        return Tail(ended=agreed.last is not None and not agreed.has_rest, last=agreed.last)

    @property
    def position(self) -> Any:
        """That of the user's loader after the latest batch, if batches are read ahead of the loop; otherwise None."""
        return None if self.agreed is None or (self.is_complete and not self.has_rest) else self.agreed.position

    @property
    def has_rest(self) -> bool:
        """Whether this rank's data had not ended when the iteration did."""
        return self.agreed is not None and self.agreed.has_rest

    def record(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and count them."""
        repeated, is_watched = self.repeated, self.is_watched
        with self.opened():
            for batch in batches:
                self.num_batches += 1
                if is_watched or repeated.is_used:
                    self.receive(batch)
                yield batch
            self.end()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context: the loop receives batches, until it leaves the iteration or `end` is called."""
        self.is_open, self._num_updates_before = True, self._numbers.num_updates
        try:
            yield
        finally:
            if not self.has_ended:
                self._leave(False)
            self.repeated.end(self)

    @property
    def is_watched(self) -> bool:
        """Whether `receive` must be called with each batch, also while `repeated.is_used` is False."""
        return self.agreed is not None or self._note is not None

    def receive(self, batch: Any) -> None:
        """Report a batch that the loop receives."""
        if self._note is not None:
            self._note(batch, self)
        factor = 1.0 if self.agreed is None else self.agreed.factors.popleft()
        if self.repeated.is_used:
            self.repeated.receive(self, factor)

    def end(self) -> None:
        """Called when there is no batch left."""
        self.has_ended = True
        self._numbers.ahead.end(self._leave)

    def _leave(self, is_complete: bool) -> None:
        self.is_open, self.is_complete = False, is_complete
        self.has_trained = self._numbers.num_updates != self._num_updates_before
