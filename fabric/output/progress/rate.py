"""The progress and rate of an iteration, as numbers and as one line of text. Reads no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_SECONDS = 30.0
"""The window over which a rate is computed, so that a slow start (compilation, workers) is forgotten. Not measured."""


@dataclass(slots=True, kw_only=True)
class ProgressRate:
    """The caller counts `items` and `samples`; `look` records the time."""

    total: int | None
    """Number of items; None if unknown."""
    num_ranks: int = 1
    """Number of ranks that read equally much; samples per second are those of all."""
    items: int = 0
    samples: int = 0
    seconds: float = 0.0
    """From the first `look` to the last."""
    _started: float | None = None
    _looks: deque[tuple[float, int, int]] = field(default_factory=deque)

    def look(self, now: float) -> None:
        """Record the progress at `now`, in seconds of any monotonic clock."""
        self._started = now if self._started is None else self._started
        self.seconds = now - self._started
        self._looks.append((now, self.items, self.samples))
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_SECONDS:
            self._looks.popleft()

    @property
    def items_per_second(self) -> float:
        """On this rank, over the window; 0 if no time has passed."""
        return self._rate(1)

    @property
    def samples_per_second(self) -> float:
        """Over all ranks, over the window; 0 if no time has passed."""
        return self._rate(2) * self.num_ranks

    @property
    def seconds_left(self) -> float | None:
        """At the rate of the window; None if the total or the rate is not known."""
        if self.total is None or self.items_per_second == 0:
            return None
        return max(0, self.total - self.items) / self.items_per_second

    def line(self) -> str:
        """`120/450  3,210 samples/s  0:00:12  0:00:33 left`; items per second if the batch size is not known."""
        rate, unit = (self.samples_per_second, "samples/s") if self.samples else (self.items_per_second, "it/s")
        parts = [
            f"{self.items}/{self.total}" if self.total is not None else f"{self.items}",
            f"{rate:,.0f} {unit}" if rate >= 10 else f"{rate:.2f} {unit}",
            _clock(self.seconds),
        ]
        if self.seconds_left:
            parts.append(f"{_clock(self.seconds_left)} left")
        return "  ".join(parts)

    def _rate(self, column: int) -> float:
        first, last = self._looks[0], self._looks[-1]
        passed = last[0] - first[0]
        return (last[column] - first[column]) / passed if passed > 0 else 0.0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
