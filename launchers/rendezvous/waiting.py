"""How a rank waits for others: it reports the missing ranks every few seconds, and raises at the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, final

from fabric.launchers.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SAY_EVERY_SECONDS = 5.0
"""The interval between two reports of missing ranks. Not measured: long enough that a normal start reports nothing."""

LATER = 0.05
"""The pause between two looks, as a fraction of the time waited so far."""
LONGEST_PAUSE_SECONDS = 0.25


@final
class Patience:
    """How one rank waits in one meeting, until `deadline`; `timeout_seconds`: of the whole meeting."""

    def __init__(self, world: World, deadline: float, timeout_seconds: float, report: Callable[[str], None]) -> None:
        self._who, self._timeout_seconds, self._report = f"rank {world.rank} of {world.size}", timeout_seconds, report
        self._deadline = deadline
        self._next_words = time.monotonic() + SAY_EVERY_SECONDS

    def wait_until(self, store: Store, key: str, missing: Callable[[], Sequence[int]], *, speaks: bool) -> None:
        """Return once the key is set. Raises: TimeoutError: it is not; it names the `missing` ranks.

        One rank `speaks`: it looks repeatedly, at intervals that grow with the time waited. The others send one
        blocking request, because torch logs socket warnings for a wait that is repeated.
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
        """The time to wait before `wait_for` is called again."""
        return timedelta(seconds=max(min(self._deadline, self._next_words) - time.monotonic(), 0.001))

    def wait_for(self, missing: Sequence[int], *, speaks: bool) -> None:
        """Called while ranks are missing. `speaks`: whether this rank reports them. Raises: TimeoutError."""
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
