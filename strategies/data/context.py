"""What a rank knows when a loader is set up and read, beside the loader: its share, its device, what it is used for."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fabric.strategies.data.loop_progress import LoopProgress
from fabric.strategies.data.partition import Joined, Share, Uneven, Use
from fabric.strategies.data.transfer import Carry
from fabric.strategies.data.uneven import Votes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The collectives that the set-up of a loader uses. Every rank calls each of them."""

    size: int = 1
    broadcast: Callable[[Any], Any] = lambda obj: obj
    """Returns the object of rank 0 on every rank."""
    gather: Callable[[Any], list[Any]] = lambda obj: [obj]
    """Returns the objects of all ranks, in rank order, on every rank."""
    same: Callable[[str], bool] = lambda words: True
    """Whether all ranks passed the same string: one all-reduce of one number."""
    lead: Callable[[str, Any], Any] = lambda name, obj: obj
    """Returns the object that rank 0 has under a name, on every rank; rank 0 does not wait for the others."""
    votes: Callable[[], Votes] | None = None
    """Makes the `Votes` by which a loader agrees on its number of batches. None: not supported."""


ALONE = Ranks()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderContext:
    """What a rank knows when a loader is set up, beside the loader."""

    share: Share
    device: torch.device
    """Where batches are moved to; "cpu": they are not moved."""
    ranks: Ranks = ALONE
    launcher: str = ""
    """The launcher that started the rank."""
    progress: LoopProgress = field(default_factory=LoopProgress)
    """What the loop has done so far."""
    report: Callable[[str], None] = lambda sentence: None
    """Shows a message, on one rank."""
    use: Use = "train"
    uneven: Uneven | None = None
    """What ranks do when the first has no batch left."""
    forward_communicates: bool = False
    """Whether a forward waits for the other ranks, so that they need equal numbers of batches in evaluation."""
    carry: Carry | None = None
    """Moves batches to the device, if the strategy has its own function for it."""
    before_iterating: Callable[[], None] = lambda: None

    @property
    def trains(self) -> bool:
        """Whether ranks need equal numbers of batches, unless they agree on them while they read."""
        return self.use == "train"

    @property
    def resumes_left(self) -> bool:
        """Whether the position after a `break` is within the epoch; otherwise at the beginning of the next one."""
        return self.use in ("train", "predict")

    @property
    def joined(self) -> Joined | None:
        """The shares that this process reads in place of other ranks, unless it reads the loader whole."""
        return None if self.ranks is ALONE else self.progress.joined

    @property
    def first_share(self) -> Share:
        """This rank's share; rank 0's, for a process that reads in place of several ranks."""
        return self.share if self.joined is None else self.joined.shares()[0]

    @property
    def evaluates_in_step(self) -> bool:
        """Whether the ranks evaluate, and must do so in equally many batches."""
        return not self.trains and (self.forward_communicates or self.uneven is not None)

    @property
    def part(self) -> Share | None:
        """The part that this rank reads of data that was split over ranks; None with one rank."""
        return self.share if self.ranks.size > 1 else None

    def alone(self) -> "LoaderContext":
        """The context of a loader that this rank reads whole, without collectives."""
        return replace(self, share=Share(), ranks=ALONE, use="predict")
