"""How long a rank waits for others, and what it says meanwhile: who is missing, every few seconds, then an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

from fabric.launchers.world import World

SAY_EVERY_SECONDS = 5.0
"""How long a wait lasts before it says for whom it waits. Unmeasured: long enough that a normal start says nothing."""


@final
class Patience:
    """That of one rank in one meeting, until `deadline`; `timeout_seconds` is how long the whole meeting may take."""

    def __init__(self, world: World, deadline: float, timeout_seconds: float, say: Callable[[str], None]) -> None:
        self._who, self._timeout_seconds, self._say = f"rank {world.rank} of {world.size}", timeout_seconds, say
        self._deadline = deadline
        self._next_words = time.monotonic() + SAY_EVERY_SECONDS

    def turn(self) -> timedelta:
        """How long to wait before `wait_for` is called again."""
        return timedelta(seconds=max(min(self._deadline, self._next_words) - time.monotonic(), 0.001))

    def wait_for(self, missing: Sequence[int], *, speaks: bool) -> None:
        """Called while ranks are missing. `speaks`: whether it is this rank that says so. Raises: TimeoutError."""
        now, ranks = time.monotonic(), f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
        if now > self._deadline:
            raise TimeoutError(
                f"{self._who.capitalize()} waited {self._timeout_seconds:g} s for {ranks}, which did not arrive. "
                "Check that every rank was started, and that all of them reach `launch`."
            )
        if now > self._next_words:
            self._next_words = now + SAY_EVERY_SECONDS
            if speaks:
                self._say(f"{self._who} waits for {ranks}")
