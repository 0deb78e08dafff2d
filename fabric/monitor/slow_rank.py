"""Which rank the others wait for, in which phase, and by how much.

A rank that is late inside backward makes every rank's backward equally long, because the all-reduce waits for it. So
the time that each rank waits at collectives is taken out of its phases: what is left is its own time, and the rank with
more of it than the others is late.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from fabric.monitor.window import NUM_LAST, PHASES, SAVING

MIN_STEPS = 5
"""In fewer steps no rank is named."""
MIN_SHARE = 0.1
"""Of a step; less is not named. The numbers of this file are chosen, not measured."""
MIN_SECONDS = 0.01
"""Of a step. A save has ten times as much."""
MIN_QUEUED = 2.0
"""Less than so many times the time for which a rank waits for a processor is not named: on a busy machine that differs
from rank to rank and from step to step."""
MOST_STEPS = 0.8
"""Share of the steps in which one rank must be the last, by no less than the least."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank for which the others wait."""

    rank: int
    phase: str
    seconds: float
    """How much more of its own time it needs than the median rank: in a step, or in a save."""
    share: float
    """Of the time of a step, or of a save."""
    is_passing: bool = False
    """Whether it was another rank before."""

    def in_words(self) -> str:
        """One sentence."""
        of, place = "save" if self.phase == PHASES[SAVING] else "step", _PLACES.get(self.phase, f"in {self.phase}")
        moves = " The delay moves from rank to rank: it is passing." if self.is_passing else ""
        return (
            f"Rank {self.rank} is late {place}, by {1e3 * self.seconds:,.0f} ms of each {of} ({self.share:.0%}); the "
            f"others wait for it.{moves}"
        )


_PLACES = {"optimizer": "in the optimizer step", "saving": "saving", "other": "in the rest of the loop"}


@final
class SlowRanks:
    """Finds the slow rank of each window. A rank is named only if it is unmistakable: for a step, in two windows in a
    row."""

    def __init__(self) -> None:
        self._named: SlowRank | None = None
        self._seen: tuple[str, int | None] | None = None
        """Phase and rank of the window before; no rank if the delay was passing."""

    def find(self, own_rsp: Tensor, queued_rs: Tensor, step_seconds: float) -> SlowRank | None:
        """The slow rank, from each rank's own time: ranks, last steps and the saves, phases; NaN where it is not known.

        A delay that is on another rank in each step, or was on another one when a rank was last named, is passing.
        `queued_rs`: how long in each step each rank was ready to run and its processor ran another program: a rank is
        not called slow for that.
        """
        found = _in_steps(own_rsp[:, :NUM_LAST], queued_rs[:, :NUM_LAST], step_seconds)
        seen = None if found is None else (found.phase, None if found.is_passing else found.rank)
        is_seen_again, self._seen = seen == self._seen, seen
        found = (found if is_seen_again else None) or _in_saves(own_rsp[:, NUM_LAST, SAVING])
        if found is None:
            return None
        last, self._named = self._named, found
        is_passing = found.is_passing or (last is not None and last.phase == found.phase and last.rank != found.rank)
        return replace(found, is_passing=is_passing)


def unknown_in_words(own_rsp: Tensor, queued_rs: Tensor, step_seconds: float) -> str:
    """One sentence where a late rank may stay unnamed; otherwise nothing. Arguments as for `SlowRanks.find`."""
    if len(own_rsp) < 2:
        return ""
    num_known = int((~own_rsp[:, :NUM_LAST].isnan().any(2).any(0)).sum())
    if num_known < MIN_STEPS:
        return f"No late rank can be named: all collectives are known of {num_known} steps, and {MIN_STEPS} are needed."
    least = MIN_QUEUED * float(queued_rs[:, :NUM_LAST].nanmean(1).max())
    if least <= max(MIN_SECONDS, MIN_SHARE * step_seconds):
        return ""
    return f"Busy machine: ranks wait for processors. A rank late by less than {1e3 * least:,.0f} ms is not named."


def _in_steps(own_rsp: Tensor, queued_rs: Tensor, step_seconds: float) -> SlowRank | None:
    is_known = ~own_rsp.isnan().any(2).any(0)
    own_rsp, queued_rs = own_rsp[:, is_known], queued_rs[:, is_known]
    if own_rsp.shape[1] < MIN_STEPS or len(own_rsp) < 2:
        return None
    whole_rs, middle = own_rsp.sum(2), len(own_rsp) // 2 - 1
    whole_rs = whole_rs - _of_others(whole_rs, len(own_rsp) - 2)
    queued = queued_rs - _of_others(queued_rs, middle)
    # Of two ranks one of which waits unrecorded for the other, neither needs more time in all than the other.
    more_rsp = (own_rsp - _of_others(own_rsp, middle)).minimum(whole_rs[..., None]) - queued.clamp(min=0)[..., None]
    least = max(MIN_SECONDS, MIN_SHARE * step_seconds, MIN_QUEUED * float(queued_rs.mean(1).max()))
    most_sp, ranks_sp = more_rsp.max(0)
    phase = int(most_sp.median(0).values.argmax())
    most_s, ranks_s, rank = most_sp[:, phase], ranks_sp[:, phase], int(ranks_sp[:, phase].mode().values)
    is_one = bool(((most_s >= least) & (ranks_s == rank)).double().mean() >= MOST_STEPS)
    if not is_one:  # another rank in each step, or in every few
        rank = int(ranks_s[-1])
        if (most_s >= 3 * least).double().mean() < MOST_STEPS:
            return None
    seconds = float((more_rsp[rank, :, phase] if is_one else most_s).median())
    return SlowRank(
        rank=rank, phase=PHASES[phase], seconds=seconds, share=seconds / step_seconds, is_passing=not is_one
    )


def _of_others(of_ranks: Tensor, number: int) -> Tensor:
    """For each rank, the value of the other ranks that has this number in their order, from the smallest on."""
    ordered = of_ranks.sort(0).values
    return torch.where(of_ranks > ordered[number], ordered[number], ordered[number + 1])


def _in_saves(own_r: Tensor) -> SlowRank | None:
    """One rank that needs more than three times the time of the others for what each of them does."""
    rank = int(own_r.nan_to_num().argmax())
    others = float(own_r[torch.arange(len(own_r)) != rank].median())
    seconds = float(own_r[rank]) - others
    if not seconds > max(10 * MIN_SECONDS, 2 * others):
        return None
    return SlowRank(rank=rank, phase=PHASES[SAVING], seconds=seconds, share=seconds / float(own_r[rank]))
