"""Agreement between ranks when a loader is set up: the same data, one seed, one state of each random generator.

If ranks had different loaders, samples would be read twice or never, silently; so digests of their descriptions are
compared. Cost: a broadcast from rank 0 and an all-reduce of one number at set-up; descriptions of all ranks are
gathered only for the error. Nothing is sent later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fabric.strategies.data.dispatch import Channel
from fabric.strategies.data.rng import Rng, digest, mix
from fabric.strategies.data.uneven import Votes

SHUFFLED_BY = "random state of its shuffle"
"""The key of a description that holds the random state of a dataset that shuffles itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The collectives that the set-up of a loader uses. Every rank calls each of them."""

    size: int
    broadcast: Callable[[Any], Any]
    """Returns the object of rank 0 on every rank."""
    gather: Callable[[Any], list[Any]]
    """Returns the objects of all ranks, in rank order, on every rank."""
    same: Callable[[str], bool]
    """Whether all ranks passed the same string: one all-reduce of one number."""
    votes: Callable[[], Votes] | None = None
    """Makes the `Votes` by which a loader agrees on its number of batches. None: not supported."""
    channel: Callable[[int], Channel] | None = None
    """Makes the `Channel` of a loader that rank 0 reads, given the share of this rank. None: not supported."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seed and generator states of rank 0, from which every rank makes its order."""

    seed: int
    states: list[Any]
    """State of each random generator of the loader's samplers."""


def agree_on_seed(own: list[Rng], number: int, ranks: Ranks) -> Seeds:
    """Broadcast the seed and the generator states of rank 0. No generator is drawn from or written.

    Ranks: all call it.

    The seed depends on the state of torch's global generator, hence on `seed_everything`, and on `number`: see
    `LoaderNumbers`.
    """
    seed = mix("loader", number, digest(torch.default_generator.get_state()))
    mine = Seeds(seed, [rng.read() for rng in own])
    if ranks.size == 1:
        return mine
    return Seeds(*ranks.broadcast((mine.seed, mine.states)))


def agree_on_loader(described: Mapping[str, Any], own: list[Rng], ranks: Ranks) -> bool:
    """Check that all ranks have the same description; return whether the states of their generators are equal, too.

    Ranks: all call it. Raises: ValueError: on every rank, if descriptions differ.
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
        "The ranks were given different loaders, so some samples would be read twice and others never:\n"
        + "\n".join(lines)
        + f"\nBuild the same loader on every rank, over the whole dataset.{seeded} If each rank reads data of its "
        "own, or a part that was split before, pass `use_distributed_sampler=False`."
    )
