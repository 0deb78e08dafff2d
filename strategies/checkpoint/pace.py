"""How fast a save in the background writes: with rests, until something waits for it.

The rests leave the disk to others, such as a data loader; on a virtual machine, the processors with which the host
writes as well.
"""

from __future__ import annotations

import threading
from typing import final

_REST = 8.0
"""For each second of writing."""
_MOST_REST_SECONDS = 60.0
"""In one save: a large one is not to take several times as long as it needs."""


@final
class Pace:
    """The rests of one save, until somebody waits for it."""

    def __init__(self) -> None:
        self._is_awaited = threading.Event()
        self._left_seconds = _MOST_REST_SECONDS

    def hurry(self) -> None:
        """Rest no longer, from now on."""
        self._is_awaited.set()

    def limit(self, num_seconds: float) -> None:
        """Rest for so many seconds at most, from now on."""
        self._left_seconds = min(self._left_seconds, num_seconds)

    def rest(self, num_seconds: float) -> None:
        """Called after a write that took so many seconds."""
        rest = min(_REST * num_seconds, self._left_seconds)
        self._left_seconds -= rest
        self._is_awaited.wait(rest)
