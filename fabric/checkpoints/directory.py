"""The checkpoints of one run in one folder: `CheckpointDirectory("runs/7").save(fabric, state)`.

The name of each has all metadata, `000012-step-3000-metric-0.25`, so that one listing suffices. The number counts
saves, not steps: a run that resumes from an older checkpoint saves newer ones with smaller steps. The manifest is
removed first: if the job is killed then, the rest is an incomplete checkpoint, which the next save removes.
"""

import contextlib
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final, get_args

from fabric.strategies.checkpoint.errors import read_by_rank_zero
from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.storage import storage_of
from fabric.strategies.checkpoint.write_and_commit import PendingSave

if TYPE_CHECKING:
    from fabric.fabric import Fabric
    from fabric.strategies.checkpoint.state import Filter

Best: TypeAlias = Literal["min", "max"]
_PATTERN = re.compile(r"(\d{6,})(?:-step-(\d+))?(?:-metric-(-?(?:inf|nan|\d+\.?\d*(?:e[-+]?\d+)?)))?")


@final
@dataclass(frozen=True, slots=True)
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
    def parse(cls, text: str) -> "Name | None":
        """From the name of a folder; None if it is not the name of a checkpoint."""
        found = _PATTERN.fullmatch(text)
        if found is None:
            return None
        number, step, metric = found.groups()
        return cls(int(number), None if step is None else int(step), None if metric is None else float(metric))


@final
class CheckpointDirectory:
    """A folder, or an address for fsspec, of the checkpoints of one run. The last and the best ones are kept.

    `keep_last`: how many of the newest, 1 or more. `keep_best`: how many besides, of those with a `metric`. `best`:
    which metric that is, "min" or "max". A checkpoint is removed only once a newer one is complete. What is not
    complete is taken for the remains of a job that died, and removed by the next save. Folders with other names than
    `save` gives are left alone.
    """

    def __init__(
        self, path: str | os.PathLike[str], keep_last: int = 3, keep_best: int = 0, best: Best = "min"
    ) -> None:
        if type(keep_last) is not int or keep_last < 1:
            raise ValueError(f"`keep_last={keep_last!r}`: how many checkpoints are kept, 1 or more.")
        if type(keep_best) is not int or keep_best < 0:
            raise ValueError(f"`keep_best={keep_best!r}`: how many of the best are kept besides, 0 or more.")
        if best not in get_args(Best):
            raise ValueError(f"`best={best!r}`: write 'min' where a smaller metric is better, or 'max'.")
        self._storage = storage_of(path)
        self._keep_last, self._keep_best, self._best = keep_last, keep_best, best

    @property
    def path(self) -> str:
        """As it was given."""
        return self._storage.path

    def save(
        self,
        fabric: "Fabric",
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        metric: float | None = None,
        filter: "Filter | None" = None,
        blocking: bool = True,
    ) -> PendingSave:
        """Save as `fabric.save`, under the next name, and remove what need not be kept once that is complete.

        `step`, `metric`: for the name, and the choice of the best; those of rank 0 count. Without a metric, as where a
        job is preempted, it is among the last, and never the best. Gives the `path` of the checkpoint, and `wait()`.
        Ranks: all. Raises: as `fabric.save`; ValueError, on every rank: on rank 0 the metric is not one number, or the
        step not an integer from 0 on.
        """
        _ready(fabric)  # a checkpoint that is not complete yet would be taken for the remains of a dead job
        if (wrong := fabric.collective.broadcast_object(self._wrong(step, metric))) is not None:
            raise ValueError(wrong)
        removes = fabric._connected.checkpoints.folder is None
        folder = read_by_rank_zero(fabric.collective, self.path, lambda: self._next(step, metric, removes=removes))
        after_commit = self._remove_old if removes else None
        return fabric.save(self._storage.inside(folder).path, state, filter, blocking, after_commit=after_commit)

    def load(
        self, fabric: "Fabric", state: MutableMapping[str, Any], strict: bool = True, *, resume_loaders: bool = True
    ) -> str | None:
        """Load the newest complete checkpoint as `fabric.load`, and return its path; None where there is none.

        Entries that `state` does not name: `fabric.load(path)`. Ranks: all; rank 0 chooses. Raises: as `fabric.load`.
        """
        _ready(fabric)
        if (path := read_by_rank_zero(fabric.collective, self.path, self.latest)) is not None:
            fabric.load(path, state, strict, resume_loaders=resume_loaders)
        return path

    def latest(self) -> str | None:
        """The path of the newest complete checkpoint; None where there is none. Any process may call it, alone."""
        return next(reversed(self.all()), None)

    def best(self) -> str | None:
        """The path of the complete checkpoint with the best metric; None where none has one."""
        complete = self._complete()
        return next((self._storage.inside(complete[name]).path for name in self._by_metric(complete)), None)

    def all(self) -> list[str]:
        """The paths of all complete checkpoints, oldest first."""
        return [self._storage.inside(folder).path for folder in self._complete().values()]

    def _wrong(self, step: Any, metric: Any) -> str | None:
        """What is wrong with the arguments of `save`; None if nothing is."""
        try:
            float(0.0 if metric is None else metric)
        except (TypeError, ValueError, RuntimeError):
            return f"`metric={metric!r}`: one number, by which the best is known. Write `metric=float(...)`."
        with contextlib.suppress(TypeError):
            if step is None or operator.index(step) >= 0:
                return None
        return f"`step={step!r}`: the number of steps until this checkpoint, an integer from 0 on."

    def _next(self, step: int | None, metric: float | None, *, removes: bool) -> str:
        """The name of the next checkpoint. `removes`: the incomplete ones of jobs that died."""
        names, at = self._names(), None if step is None else operator.index(step)
        for name in names.keys() - self._complete().keys() if removes else ():
            with contextlib.suppress(OSError):
                self._storage.inside(names[name]).discard()
        number = max((name.number for name in names), default=0) + 1
        return str(Name(number, at, None if metric is None else float(metric)))

    def _names(self) -> dict[Name, str]:
        """The checkpoints, complete or not, oldest first, with the names of their folders."""
        found = {name: folder for folder in self._storage.folders() if (name := Name.parse(folder)) is not None}
        return dict(sorted(found.items(), key=lambda each: each[0].number))

    def _complete(self) -> dict[Name, str]:
        return {name: folder for name, folder in self._names().items() if NAME in self._storage.inside(folder).names()}

    def _by_metric(self, names: Iterable[Name]) -> list[Name]:
        """Those that have a metric, best first; of equal metrics the newer first. Without those whose metric is NaN."""
        measured = [name for name in names if name.metric is not None and not math.isnan(name.metric)]
        sign = 1 if self._best == "min" else -1
        return sorted(measured, key=lambda name: (sign * (name.metric or 0.0), -name.number))

    def _remove_old(self) -> None:
        """Remove the complete checkpoints that are neither among the last nor the best."""
        complete = self._complete()
        kept = {*list(complete)[-self._keep_last :], *self._by_metric(complete)[: self._keep_best]}
        for name, folder in complete.items():
            if name not in kept:
                old = self._storage.inside(folder)
                old.remove(NAME)
                old.discard()


def _ready(fabric: "Fabric") -> None:
    """Wait for the save in the background, if there is one. Raises: TypeError: it is a `fabric.lightning.Fabric`."""
    if getattr(fabric, "core", fabric) is not fabric:
        raise TypeError(
            "`CheckpointDirectory` was given a `fabric.lightning.Fabric`. Pass the core of it, and modules "
            "without their wrappers: `checkpoints.save(fabric.core, {'model': model.module, 'optimizer': optimizer})`."
        )
    fabric.wait_for_save()
