"""The checkpoints of one run in one folder: `CheckpointDirectory("runs/7").save(fabric, state)`."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, final, get_args

from fabric.strategies.checkpoint.background import PendingSave
from fabric.strategies.checkpoint.loading import from_rank_zero
from fabric.strategies.checkpoint.retention import (
    Best,
    Name,
    best_of,
    complete_in,
    names_in,
    remove_incomplete,
    remove_old,
)
from fabric.strategies.checkpoint.storage import storage_of

if TYPE_CHECKING:
    from fabric.fabric import Fabric
    from fabric.strategies.checkpoint.state import Filter


@final
class CheckpointDirectory:
    """A folder, or an address for fsspec, of the checkpoints of one run, of which the last and the best are kept.

    `keep_last`: how many of the newest, 1 or more. `keep_best`: how many besides, by the `metric` that `save` is given;
    `best`: which metric that is, the "min" or the "max". A checkpoint is removed only once a newer one is complete.
    What is not complete is taken for the remains of a job that died, and removed by the next save, unless another
    process of this machine is saving it. Folders with other names than `save` gives are left alone.
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
        fabric: Fabric,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        metric: float | None = None,
        filter: Filter | None = None,
        blocking: bool = True,
    ) -> PendingSave:
        """Save as `fabric.save`, under the next name, and remove what need not be kept once that is complete.

        `step`, `metric`: for the name, and the choice of the best; those of rank 0 count. Gives the `path` of the
        checkpoint, and `wait()`. Ranks: all. Raises: as `fabric.save`; ValueError, on every rank: on rank 0 there is
        `keep_best` and no metric, a metric that is not one number, or a step that is not an integer from 0 on.
        """
        wrong = fabric.collective.broadcast_object(self._wrong(step, metric))
        if wrong is not None:
            raise ValueError(wrong)
        fabric.wait_for_save()  # what it has not completed yet would be taken for the remains of a dead job
        folder = from_rank_zero(fabric.collective, self._storage, lambda: self._next(step, metric))
        return fabric.save(
            self._storage.inside(folder).path,
            state,
            filter,
            blocking,
            after_commit=partial(remove_old, self._storage, self._keep_last, self._keep_best, self._best),
        )

    def load(
        self,
        fabric: Fabric,
        state: MutableMapping[str, Any],
        strict: bool = True,
        *,
        resume_loaders: bool = True,
    ) -> dict[str, Any] | None:
        """Load the newest complete checkpoint as `fabric.load`; None, and nothing is changed, where there is none.

        Ranks: all; rank 0 chooses. Raises: as `fabric.load`.
        """
        fabric.wait_for_save()
        path = from_rank_zero(fabric.collective, self._storage, self.latest)
        return None if path is None else fabric.load(path, state, strict, resume_loaders=resume_loaders)

    def latest(self) -> str | None:
        """The path of the newest complete checkpoint; None where there is none. Any process may call it, alone."""
        return next(
            (self._storage.inside(folder).path for folder in reversed(complete_in(self._storage).values())), None
        )

    def best(self) -> str | None:
        """The path of the complete checkpoint with the best metric; None where none has one."""
        complete = complete_in(self._storage)
        return next((self._storage.inside(complete[name]).path for name in best_of(list(complete), self._best)), None)

    def all(self) -> list[str]:
        """The paths of all complete checkpoints, oldest first."""
        return [self._storage.inside(folder).path for folder in complete_in(self._storage).values()]

    def _wrong(self, step: object, metric: Any) -> str | None:
        """What is wrong with the arguments of `save`; None if nothing is."""
        if self._keep_best and metric is None:
            return f"`keep_best={self._keep_best}` needs `save(..., metric=...)`, by which the best is known."
        try:
            float(0.0 if metric is None else metric)
        except (TypeError, ValueError, RuntimeError):
            return f"`metric={metric!r}`: one number, by which the best is known. Write `metric=float(...)`."
        if step is not None and not _is_count(step):
            return f"`step={step!r}`: the number of steps until this checkpoint, an integer from 0 on."
        return None

    def _next(self, step: int | None, metric: float | None) -> str:
        number = max((name.number for name in names_in(self._storage)), default=0) + 1
        remove_incomplete(self._storage)
        step = None if step is None else operator.index(step)
        return str(Name(number=number, step=step, metric=None if metric is None else float(metric)))


def _is_count(step: Any) -> bool:
    try:
        return operator.index(step) >= 0
    except TypeError:
        return False
