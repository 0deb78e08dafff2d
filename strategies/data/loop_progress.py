"""What a loop does with the batches of its loaders: how many it receives, repeats, reads ahead and trains on."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

from fabric.strategies.data.partition import Joined
from fabric.strategies.data.rng import SharedRngs

End: TypeAlias = Callable[[bool], None]
"""Called once the loop has left the iteration. True: the loop has asked for another batch and there is none. False: the
loop left before."""


@final
class LoopProgress:
    """What the loop has done so far, and the random states from which it draws, for all loaders of a process."""

    def __init__(self) -> None:
        self.rngs = SharedRngs()
        self.num_backwards = 0
        """Backward passes of the loop. An iteration that ends after one batch without a backward uses up no epoch."""
        self.num_steps = 0
        """Steps of all optimizers."""
        self.num_unweighted = 0
        """Backward passes without `weight=`."""
        self.repeated = RepeatedBatches()
        self._found: list[End] | None = None
        """The ends of iterations that were found by reading ahead."""
        self.note_batch: Callable[[Any, object], None] | None = None
        """Called with each batch that the loop receives, and with the batch's `Iteration`."""
        self.joined: Joined | None = None
        """For one process that reads in place of several ranks. None: the process reads its own share."""

    @property
    def num_updates(self) -> int:
        """Backward passes and optimizer steps."""
        return self.num_backwards + self.num_steps

    @contextmanager
    def reading_ahead(self) -> Iterator[list[End]]:
        """Context: a batch is read that the loop has not asked for, as `fabric.accumulate` does.

        Yields a list of the iterations that end here. Until the loop itself asks for another batch, the loop, and the
        position in a checkpoint, are within the epoch.
        """
        before, self._found = self._found, []
        try:
            yield self._found
        finally:
            self._found = before

    def end(self, end: End) -> None:
        """Called by an iteration that has no batch left. Calls `end` now; the reader ahead calls it later."""
        if self._found is None:
            end(True)
        else:
            self._found.append(end)


@final
class RepeatedBatches:
    """How much the loss of a batch counts, if ranks whose data has ended repeat a batch while others go on.

    A mean over ranks would count repeated batches as well. So `backward` multiplies the loss by a factor: 0 on a rank
    that repeats a batch, `W / n` on the `n` ranks of `W` that have data. All ranks know `n` since they have agreed on
    who has data, so nothing is sent. `weight=` becomes 0 on a rank that repeats a batch. Nothing is recorded until some
    loader repeats batches.
    """

    def __init__(self) -> None:
        self.is_used = False
        """Whether a loader with `uneven="repeat"` was iterated."""
        self._received: Counter[tuple[object, float]] = Counter()
        """The number of batches since the last backward, by iteration over a loader and factor."""
        self._factor = 1.0
        """The factor of the last backward."""
        self._iterations: dict[object, bool] = {}
        """Iterations whose batches had a backward; the value: whether the loop had read ahead before that."""

    def begin(self) -> None:
        """Called when an iteration over a loader begins that may repeat batches."""
        self.is_used = True
        self._received = Counter({key: number for key, number in self._received.items() if key[0] in self._iterations})

    def receive(self, iteration: object, factor: float) -> None:
        """Called with the factor of each batch that the loop receives."""
        self._received[iteration, factor] += 1

    def end(self, iteration: object) -> None:
        """Called when an iteration ends, or its loop is left."""
        if self._iterations.pop(iteration, None) is not None:
            self._factor = 1.0

    def take(self) -> Counter[tuple[object, float]]:
        """Remove and return the batches that were received since the last backward: they were read ahead."""
        taken, self._received = self._received, Counter()
        return taken

    def put(self, taken: Counter[tuple[object, float]]) -> None:
        """Undo `take`: the loop receives these batches now."""
        self._received.update(taken)

    @property
    def is_uncounted(self) -> bool:
        """Whether the loop has received a repeated batch, or another rank has, and no backward has followed."""
        return any(factor != 1 for _, factor in self._received)

    def factor(self) -> float:
        """The factor of the loss whose backward is about to run.

        Raises: RuntimeError: on every rank, if the loss may be of several batches with different factors.
        """
        if self._received:
            self._factor = self._common_factor()
            self._received.clear()
        return self._factor

    def _common_factor(self) -> float:
        totals: Counter[object] = Counter()
        for (iteration, _), number in self._received.items():
            totals[iteration] += number
        for iteration, total in totals.items():
            self._iterations.setdefault(iteration, total > 1)
        factor, *others = {factor for _, factor in self._received}
        if others or (factor != 1 and any(self._iterations[each] for each in totals)):
            raise RuntimeError(_WHICH_BATCH)
        return factor


_WHICH_BATCH = (
    'With `uneven="repeat"` a batch that is repeated on some ranks counts zero in gradients, and this loop received '
    "several batches before `fabric.backward`, some repeated and some not: it reads ahead, skips batches, or reads two "
    "loaders at once. Write `for window in fabric.accumulate(loader, n)`, or pass `uneven='stop'`."
)
NOT_COUNTED = (
    "on batches that some ranks did not have: their data had ended, they repeated a batch "
    '(`uneven="repeat"`), and no `fabric.backward` has followed that would count it zero. Call `fabric.backward(loss)` '
    'instead of `loss.backward()`, `fabric.average_gradients(...)` before the step, or pass `uneven="stop"`.'
)
