"""Which rank the others wait for, in which phase, and by how much.

A rank that is late inside backward makes every rank's backward equally long, because the all-reduce waits for it. So
the time that each rank waits at collectives is taken out of its phases: what is left is its own time, and the rank with
more of it than the others is late.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from fabric.monitor.window import NUM_LAST, PHASES, SAVING

MIN_STEPS = 5
"""Fewer steps name nobody."""
MIN_SHARE = 0.1
"""Of a step; less is not named. The numbers of this file are chosen, not measured."""
MIN_SECONDS = 0.005
SURE_SHARE = 0.5
"""Of a step or a save, for what one window alone shows."""
MOST_STEPS = 0.8
"""Share of the steps in which one rank must be the last."""


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
        of, place = ("save", "saving") if self.phase == PHASES[SAVING] else ("step", _PLACES[self.phase])
        moves = " The delay moves from rank to rank: it is passing." if self.is_passing else ""
        return (
            f"Rank {self.rank} is late {place}, by {1e3 * self.seconds:,.0f} ms of each {of} ({self.share:.0%}); the "
            f"others wait for it.{moves}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


_PLACES = {
    "data": "in data",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
    "other": "in the rest of the loop",
}


@final
class SlowRanks:
    """Finds the slow rank of each window. Less than half of a step must be seen in two windows in a row."""

    def __init__(self) -> None:
        self._named: SlowRank | None = None
        self._seen: SlowRank | None = None

    def find(self, own_rsp: Tensor, queued_rs: Tensor, step_seconds: float) -> SlowRank | None:
        """The slow rank of the next window; None: nobody.

        `own_rsp`: each rank's own time by step and phase; NaN: unknown. `queued_rs`: how long in a step each rank was
        ready to run and its processor ran another program: a rank is not called slow for that.
        """
        if len(own_rsp) < 2:
            return None
        found = _in_steps(own_rsp[:, :NUM_LAST], queued_rs[:, :NUM_LAST], step_seconds)
        found = found or _in_saves(own_rsp[:, NUM_LAST, SAVING])
        before, self._seen = self._seen, found
        is_seen_again = found is not None and before is not None and _is_same(found, before)
        if found is None or not (found.share >= SURE_SHARE or is_seen_again):
            return None
        last, self._named = self._named, found
        is_passing = found.is_passing or (last is not None and last.phase == found.phase and last.rank != found.rank)
        return replace(found, is_passing=is_passing)


def _is_same(one: SlowRank, other: SlowRank) -> bool:
    return one.phase == other.phase and (one.rank == other.rank or (one.is_passing and other.is_passing))


def _in_steps(own_rsp: Tensor, queued_rs: Tensor, step_seconds: float) -> SlowRank | None:
    is_known = ~own_rsp.isnan().any(2).any(0)
    own_rsp, queued_rs = own_rsp[:, is_known], queued_rs[:, is_known]
    if own_rsp.shape[1] < MIN_STEPS:
        return None
    everyone = torch.arange(len(own_rsp))
    more_rsp = torch.stack([own_rsp[rank] - own_rsp[everyone != rank].median(0).values for rank in everyone])
    queued = torch.stack([queued_rs[rank] - queued_rs[everyone != rank].median(0).values for rank in everyone])
    more_rsp -= queued.clamp(min=0)[..., None]
    more_rp = more_rsp.median(1).values
    rank, phase = divmod(int(more_rp.argmax()), len(PHASES))
    seconds, least = float(more_rp[rank, phase]), max(MIN_SECONDS, MIN_SHARE * step_seconds)
    is_last = more_rsp[..., phase].argmax(0) == rank
    if is_last.double().mean() >= MOST_STEPS and seconds >= least:
        return SlowRank(rank=rank, phase=PHASES[phase], seconds=seconds, share=seconds / step_seconds)
    # Another rank in each step, or in every few.
    phase = int(more_rsp.amax(0).median(0).values.argmax())
    most_s, ranks_s = more_rsp[..., phase].max(0)
    seconds = float(most_s.median())
    if (most_s >= 3 * least).double().mean() < MOST_STEPS:
        return None
    return SlowRank(
        rank=int(ranks_s[-1]), phase=PHASES[phase], seconds=seconds, share=seconds / step_seconds, is_passing=True
    )


def _in_saves(own_r: Tensor) -> SlowRank | None:
    """One rank that needs more than twice the time of the others for what each of them does."""
    rank = int(own_r.nan_to_num().argmax())
    others = float(own_r[torch.arange(len(own_r)) != rank].median())
    seconds = float(own_r[rank]) - others
    if not seconds > max(10 * MIN_SECONDS, others):
        return None
    return SlowRank(rank=rank, phase=PHASES[SAVING], seconds=seconds, share=seconds / float(own_r[rank]))
