"""What the ranks settle about a loader before anyone reads: one seed, one state of each generator, one order.

Where ranks were given different loaders, samples would be read twice or never and nothing would show it; so they
compare a digest of what they were given. Set-up sends a broadcast from rank 0 and an all-reduce of one number;
descriptions of all ranks are gathered only for the error. Later nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from fabric.strategies.data.dispatch import Channel
from fabric.strategies.data.rng import Rng, digest, mix
from fabric.strategies.data.uneven import Votes

SHUFFLED_BY = "random state of its shuffle"
"""The name under which a description has the random state of a dataset that shuffles itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How the set-up of a loader talks to the other ranks. Each function is called by all of them."""

    size: int
    broadcast: Callable[[Any], Any]
    """Gives every rank the object of rank 0."""
    gather: Callable[[Any], list[Any]]
    """Gives every rank the objects of all ranks."""
    same: Callable[[str], bool]
    """Whether all ranks passed the same words: one all-reduce of one number."""
    votes: Callable[[], Votes] | None = None
    """Makes what loaders agree by while they are iterated."""
    channel: Callable[[int], Channel] | None = None
    """Makes what rank 0 sends batches by, given the share of this rank."""


@final
class LoaderNumbers:
    """Numbers the loaders that are set up one after another in the same state of torch's global generator, from 0.

    Once one of them is iterated, the next is number 0 again: a program that seeds itself as before, within the same
    process, reads the same order as before.
    """

    def __init__(self) -> None:
        self._state, self._number = b"", 0
        self.num_backwards = 0
        """Of the loop. An iteration that ends after one batch without any was a peek."""
        self.num_unweighted = 0
        """Backwards without a weight."""
        self.note_batch: Callable[[Any, object], None] | None = None
        """Called with each batch that the loop receives, and its loader."""

    def next(self) -> int:
        """The number of the loader that is being set up."""
        state = digest(torch.default_generator.get_state())
        self._state, self._number = state, self._number + 1 if state == self._state else 0
        return self._number

    def restart(self) -> None:
        """Say that a loader is iterated."""
        self._state = b""


@dataclass(frozen=True, slots=True)
class Seeds:
    """The randomness of rank 0: where the order of every rank comes from."""

    seed: int
    states: list[Any]
    """Of each generator that the loader's samplers keep."""


def agree_on_seed(own: list[Rng], number: int, ranks: Ranks) -> Seeds:
    """Give every rank the seed and the generator states of rank 0. No generator is drawn from, none is written.

    The seed follows from the state of torch's global generator, so `seed_everything` governs it, and from `number`: see
    `LoaderNumbers`.
    """
    seed = mix("loader", number, digest(torch.default_generator.get_state()))
    mine = Seeds(seed, [rng.read() for rng in own])
    if ranks.size == 1:
        return mine
    return Seeds(*ranks.broadcast((mine.seed, mine.states)))


def agree_on_loader(described: Mapping[str, Any], own: list[Rng], ranks: Ranks) -> bool:
    """Return once all ranks have described the same loader; whether the states of their generators are equal, too.

    Raises: ValueError: on every rank, where the descriptions differ.
    """
    words = repr(dict(described))
    if ranks.same(f"{words}\n{[digest(rng.read()) for rng in own]}"):
        return True
    if ranks.same(words):
        return False
    raise ValueError(_difference(ranks.gather(dict(described))))


def _difference(votes: list[dict[str, Any]]) -> str:
    names = [name for name in votes[0] if any(vote.get(name) != votes[0][name] for vote in votes)]
    lines = [
        f"  rank {rank}: " + ", ".join(f"{name} {vote.get(name)}" for name in names) for rank, vote in enumerate(votes)
    ]
    seeded = " Pass the same `seed` to `.shuffle()` on every rank." if SHUFFLED_BY in names else ""
    return (
        "The ranks were given different loaders, so that some samples would be read twice and others never:\n"
        + "\n".join(lines)
        + f"\nBuild the same loader on every rank, over the whole dataset.{seeded} Where each rank reads data of its "
        "own, or a part that was split off before, pass `use_distributed_sampler=False`."
    )


def length_of(something: object) -> int | None:
    """The length of something, None where it has none."""
    try:
        return len(something)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
