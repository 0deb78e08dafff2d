"""Races: variants take turns within one process or one set of ranks, and are compared round by round.

Machines are shared and their speed drifts, so no single time is worth anything. A ratio is the median over rounds of
this round's time over the first variant's time in the same round; a difference likewise.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Action = Callable[[], object]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Row:
    """One line of the table: a variant of a measurement."""

    measurement: str
    variant: str
    median: float
    extra: float
    """Median difference to the first variant."""
    ratio: float
    """Median ratio to the first variant."""
    spread: float
    """Half of the distance between the quartiles of the ratios: half of the rounds lie within `ratio` +- this."""
    target: str = ""
    unit: str = "us"


def limited(rounds: int) -> int:
    """As many rounds, or those of the environment variable BENCH_ROUNDS where they are fewer: for a busy machine."""
    return min(rounds, int(os.environ.get("BENCH_ROUNDS", rounds)))


def amount(value: float, row: Row) -> str:
    """The value in its unit, as a reader wants it."""
    if row.unit != "us" or abs(value) < 1e3:
        return f"{value:.1f} {row.unit}"
    return f"{value / 1e3:.2f} ms" if abs(value) < 1e6 else f"{value / 1e6:.2f} s"


def race(
    measurement: str, variants: Mapping[str, Action], *, repeat: int, rounds: int = 15, target: str = ""
) -> list[Row]:
    """Run each variant `repeat` times per round, in turn; the first is what the others are held against.

    `target` is written beside our own variant.
    """
    return rows(measurement, take_turns(variants, repeat=repeat, rounds=rounds), target)


def take_turns(variants: Mapping[str, Action], *, repeat: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds that each variant took in each round, where it ran `repeat` times."""
    for action in variants.values():
        for _ in range(max(2, repeat // 10)):
            action()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(limited(rounds)):
        for name, action in in_order(variants, turn):
            start = time.perf_counter()
            for _ in range(repeat):
                action()
            times[name].append((time.perf_counter() - start) / repeat * 1e6)
    return times


def in_order(variants: Mapping[str, Value], turn: int) -> list[tuple[str, Value]]:
    """As they are, and every second time the other way round: who comes first pays for what went before."""
    return list(variants.items())[:: -1 if turn % 2 else 1]


def rows(measurement: str, values: Mapping[str, list[float]], target: str = "", unit: str = "us") -> list[Row]:
    """The lines of a table, from each variant's values per round."""
    reference = next(iter(values.values()))
    found = []
    for name, mine in values.items():
        ratios = [a / b for a, b in zip(mine, reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found.append(
            Row(
                measurement=measurement,
                variant=name,
                median=statistics.median(mine),
                extra=statistics.median(a - b for a, b in zip(mine, reference, strict=True)),
                ratio=middle,
                spread=(high - low) / 2,
                target=target if name == "ours" else "",
                unit=unit,
            )
        )
    return found
