"""The checkpoints of a run: their names, which of them are complete, and which are removed.

The name has all metadata, `000012-step-3000-metric-0.25`, so that one listing suffices. The number counts saves, not
steps: a run that resumes from an older checkpoint saves newer ones with smaller steps. The manifest is removed first:
if the job is killed then, the rest is an incomplete checkpoint, which the next save removes.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.storage import Storage

Best: TypeAlias = Literal["min", "max"]
_PATTERN = re.compile(r"(?P<number>\d{6,})(-step-(?P<step>\d+))?(-metric-(?P<metric>[^/]+))?")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """The name of one checkpoint."""

    number: int
    """Counts saves, from 1."""
    step: int | None
    metric: float | None

    def __str__(self) -> str:
        step = "" if self.step is None else f"-step-{self.step}"
        return f"{self.number:06}{step}" + ("" if self.metric is None else f"-metric-{self.metric!r}")

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """From the name of a folder; None if it is not the name of a checkpoint."""
        found = _PATTERN.fullmatch(text)
        if found is None:
            return None
        step, metric = found["step"], found["metric"]
        try:
            number = None if metric is None else float(metric)
        except ValueError:
            return None
        return cls(number=int(found["number"]), step=None if step is None else int(step), metric=number)


def names_in(storage: Storage) -> dict[Name, str]:
    """The checkpoints in this folder, complete or not, oldest first, with the names of their folders."""
    found = {name: folder for folder in storage.folders() if (name := Name.parse(folder)) is not None}
    return dict(sorted(found.items(), key=lambda each: each[0].number))


def complete_in(storage: Storage) -> dict[Name, str]:
    """The complete checkpoints in this folder, oldest first."""
    return {name: folder for name, folder in names_in(storage).items() if NAME in storage.inside(folder).names()}


def remove_incomplete(storage: Storage) -> None:
    """Remove the incomplete checkpoints of jobs that died, but not those that another job is saving."""
    complete = complete_in(storage)
    for name, folder in names_in(storage).items():
        if name not in complete:
            torn = storage.inside(folder)
            with contextlib.suppress(OSError):
                unlock = torn.lock()
                if NAME not in torn.names():  # by now it may be complete
                    torn.discard()
                unlock()


def remove_old(storage: Storage, keep_last: int, keep_best: int, best: Best) -> None:
    """Remove the complete checkpoints that are neither among the last `keep_last` nor the best `keep_best`."""
    complete = complete_in(storage)
    kept = {*list(complete)[-keep_last:], *best_of(list(complete), best)[:keep_best]}
    for name, folder in complete.items():
        if name not in kept:
            old = storage.inside(folder)
            old.remove(NAME)
            old.discard()


def best_of(names: Sequence[Name], best: Best) -> list[Name]:
    """Those that have a metric, best first; of equal metrics the newer first. Without those whose metric is NaN."""
    measured = [name for name in names if name.metric is not None and not math.isnan(name.metric)]
    sign = 1 if best == "min" else -1
    return sorted(measured, key=lambda name: (sign * (name.metric or 0.0), -name.number))
