"""Ends of epochs that are found by reading one batch ahead, as `fabric.accumulate` does.

Until the loop itself asks for another batch, it is within the epoch: so is the position that a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, final

End: TypeAlias = Callable[[bool], None]
"""Called once the loop has left the iteration: True, because it has asked for another batch and there is none; False,
because it was left before."""


@final
class ReadAhead:
    """Whether a batch is being read that the loop has not asked for."""

    def __init__(self) -> None:
        self._found: list[End] | None = None

    @contextmanager
    def reading(self) -> Iterator[list[End]]:
        """Context: a batch is read that the loop has not asked for. Yields a list of the iterations that end here."""
        before, self._found = self._found, []
        try:
            yield self._found
        finally:
            self._found = before

    def end(self, end: End) -> None:
        """Called by an iteration that has no batch left: `end` is called now, or by the one that reads ahead."""
        if self._found is None:
            end(True)
        else:
            self._found.append(end)
