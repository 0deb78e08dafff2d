"""What the loaders of a process share: numbers that tell them apart, and what the loop did since their last batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from fabric.strategies.data.read_ahead import ReadAhead
from fabric.strategies.data.repeated import RepeatedBatches
from fabric.strategies.data.rng import digest


@final
class LoaderNumbers:
    """Numbers the loaders that are set up in the same state of torch's global generator, from 0.

    Once one of them is iterated, numbers start at 0 again: a program that seeds itself again, in the same process,
    reads the same order again. Also counts backward passes for the loaders.
    """

    def __init__(self) -> None:
        self._state, self._number = b"", 0
        self.num_backwards = 0
        """Backward passes of the loop. An iteration that ends after one batch and none of these uses up no epoch."""
        self.num_steps = 0
        """Steps of all optimizers."""
        self.num_unweighted = 0
        """Backward passes without `weight=`."""
        self.forward_communicates = False
        """Whether a model was set up whose forward waits for ranks that read other data, which the strategy could not
        know before."""
        self.repeated = RepeatedBatches()
        self.ahead = ReadAhead()
        self.note_batch: Callable[[Any, object], None] | None = None
        """Called with each batch that the loop receives, and the `Iteration` that it is of."""

    @property
    def num_updates(self) -> int:
        """Backward passes and optimizer steps."""
        return self.num_backwards + self.num_steps

    def next(self) -> int:
        """The number of the loader that is being set up."""
        state = digest(torch.default_generator.get_state())
        self._state, self._number = state, self._number + 1 if state == self._state else 0
        return self._number

    def restart(self) -> None:
        """Start at 0 again: called when a loader is iterated."""
        self._state = b""
