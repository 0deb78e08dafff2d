"""Races: variants take turns within one process or one set of ranks, and are compared round by round.

Machines are shared and their speed drifts, so no single time is worth anything. A ratio is the median over rounds of
this round's time over the first variant's time in the same round; a difference likewise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Action = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table: a variant of a measurement, in microseconds."""

    measurement: str
    variant: str
    median_us: float
    extra_us: float
    """Median difference to the first variant."""
    ratio: float
    """Median ratio to the first variant."""
    target: str = ""


def race(
    measurement: str, variants: Mapping[str, Action], *, repeat: int, rounds: int = 15, target: str = ""
) -> list[Row]:
    """Run each variant `repeat` times per round, in turn; the first is what the others are held against.

    `target` is written beside our own variant.
    """
    for action in variants.values():
        for _ in range(max(2, repeat // 10)):
            action()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, action in variants.items():
            start = time.perf_counter()
            for _ in range(repeat):
                action()
            times[name].append((time.perf_counter() - start) / repeat * 1e6)
    return rows(measurement, times, target)


def rows(measurement: str, times: Mapping[str, list[float]], target: str = "") -> list[Row]:
    """The lines of a table, from each variant's times per round in microseconds."""
    reference = next(iter(times.values()))
    return [
        Row(
            measurement=measurement,
            variant=name,
            median_us=statistics.median(mine),
            extra_us=statistics.median(a - b for a, b in zip(mine, reference, strict=True)),
            ratio=statistics.median(a / b for a, b in zip(mine, reference, strict=True)),
            target=target if name == "ours" else "",
        )
        for name, mine in times.items()
    ]
