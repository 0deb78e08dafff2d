"""How much the loss of a batch counts, if ranks whose data has ended repeat a batch while others go on.

A mean over ranks would count repeated batches as well. So `backward` multiplies the loss by a factor: 0 on a rank that
repeats a batch, `W / n` on the `n` ranks of `W` that do not. All ranks know `n` from the agreement on who has data, so
nothing is sent. A weight becomes 0 on a rank that repeats. Until some loader repeats batches, nothing is recorded.
The agreement may end after the loop has received the batch (`Later`): it is waited for before the factor is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final


@final
@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """A factor on which the ranks have not agreed when the loop receives the batch."""

    wait: Callable[[], float]


Factor: TypeAlias = float | Later


@final
class RepeatedBatches:
    """The factors of the batches that the loop has received since its last backward, by iteration over a loader."""

    def __init__(self) -> None:
        self.is_used = False
        """Whether a loader with `uneven="repeat"` was iterated."""
        self._received: Counter[tuple[object, Factor]] = Counter()
        """The number of batches since the last backward, by iteration and factor."""
        self._factor = 1.0
        """That of the last backward."""
        self._iterations: dict[object, bool] = {}
        """Iterations whose batches had a backward; whether the loop had read ahead before the first."""

    def begin(self) -> None:
        """Called when an iteration over a loader begins that may repeat batches."""
        self.is_used = True
        self._received = Counter({key: number for key, number in self._received.items() if key[0] in self._iterations})

    def receive(self, iteration: object, factor: Factor) -> None:
        """Called with the factor of each batch that the loop receives."""
        if isinstance(factor, Later):  # the one before is agreed on
            self._settle([key for key in self._received if key[0] is iteration])
        self._received[iteration, factor] = self._received.get((iteration, factor), 0) + 1

    def end(self, iteration: object) -> None:
        """Called when an iteration ends, or its loop is left."""
        if self._iterations.pop(iteration, None) is not None:
            self._factor = 1.0

    def take(self) -> Counter[tuple[object, Factor]]:
        """Remove what was received since the last backward, and return it: it was read ahead."""
        taken, self._received = self._received, Counter()
        return taken

    def put(self, taken: Counter[tuple[object, Factor]]) -> None:
        """Undo `take`: the loop receives these batches now."""
        self._received.update(taken)

    @property
    def is_uncounted(self) -> bool:
        """Whether the loop has received a repeated batch, or another rank has, and no backward has followed."""
        if not self._received:
            return False
        self._settle(list(self._received))
        return any(factor != 1 for _, factor in self._received)

    def factor(self) -> float:
        """The factor of the loss whose backward is about to run.

        Raises: RuntimeError: on every rank, if the loss may be of several batches with different factors.
        """
        if self._received:
            (iteration, factor), *others = self._received
            is_usual = factor == 1 and not others and iteration in self._iterations
            self._factor = 1.0 if is_usual else self._common_factor()
            self._received.clear()
        return self._factor

    def _common_factor(self) -> float:
        self._settle(list(self._received))
        totals: Counter[object] = Counter()
        for (iteration, _), number in self._received.items():
            totals[iteration] += number
        for iteration, total in totals.items():
            self._iterations.setdefault(iteration, total > 1)
        factor, *others = {factor for _, factor in self._received if not isinstance(factor, Later)}
        if others or (factor != 1 and any(self._iterations[each] for each in totals)):
            raise RuntimeError(_WHICH_BATCH)
        return factor

    def _settle(self, received: list[tuple[object, Factor]]) -> None:
        """Wait for the factors of these batches."""
        for iteration, factor in received:
            if isinstance(factor, Later):
                self._received[iteration, factor.wait()] += self._received.pop((iteration, factor))


_WHICH_BATCH = (
    'With `uneven="repeat"` a batch that is repeated on some ranks counts zero in gradients, and this loop received '
    "several batches before `fabric.backward`, some repeated and some not: it reads ahead, skips batches, or reads two "
    "loaders at once. Write `for window in fabric.accumulate(loader, n)` for windows of batches, or pass "
    '`uneven="stop"`.'
)
NOT_COUNTED = (
    "on batches of which some ranks had none: their data had ended, they repeated a batch "
    '(`uneven="repeat"`), and no `fabric.backward` has followed that would count it zero. Call `fabric.backward(loss)` '
    'instead of `loss.backward()`, `fabric.average_gradients(...)` before the step, or pass `uneven="stop"`.'
)
