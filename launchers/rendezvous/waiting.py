"""How long a rank waits for others, and what it says meanwhile: who is missing, every few seconds, then an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, final

from fabric.launchers.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SAY_EVERY_SECONDS = 5.0
"""How long a wait lasts before it says for whom it waits. Unmeasured: long enough that a normal start says nothing."""

LATER = 0.05
"""Of the time waited so far: how much later than the last one the speaker hears it, at most."""
LONGEST_PAUSE_SECONDS = 0.25


@final
class Patience:
    """That of one rank in one meeting, until `deadline`; `timeout_seconds` is how long the whole meeting may take."""

    def __init__(self, world: World, deadline: float, timeout_seconds: float, report: Callable[[str], None]) -> None:
        self._who, self._timeout_seconds, self._report = f"rank {world.rank} of {world.size}", timeout_seconds, report
        self._deadline = deadline
        self._next_words = time.monotonic() + SAY_EVERY_SECONDS

    def wait_until(self, store: Store, key: str, missing: Callable[[], Sequence[int]], *, speaks: bool) -> None:
        """Return once the key is set. Raises: TimeoutError: it is not; it names the `missing` ranks.

        One rank of all `speaks`: it looks again and again, at times that grow with how long it has waited. The others
        send one request and hear when it is time: torch writes warnings of sockets for a wait of theirs that is
        repeated.
        """
        from torch.distributed import DistStoreError

        started = time.monotonic()
        while speaks and not store.check([key]):
            self.wait_for(missing() if time.monotonic() > min(self._next_words, self._deadline) else (), speaks=True)
            time.sleep(min(max((time.monotonic() - started) * LATER, 0.001), LONGEST_PAUSE_SECONDS))
        while True:
            try:
                store.wait([key], timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
                return
            except DistStoreError:
                self.wait_for(missing(), speaks=False)

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
                self._report(f"{self._who} waits for {ranks}")
