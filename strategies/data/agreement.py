"""What the ranks settle about a loader before anyone reads: one seed, one state of each generator, one order.

Two messages at set-up, none later. Where ranks were given different loaders, samples would be read twice or never
and nothing would show it; so they compare what they were given, and the first indices of what they would draw.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch

from fabric.strategies.data.randomness import Rng, Streams, digest, mix

NUM_COMPARED = 256
"""Indices whose equality is taken for the equality of orders."""
NUM_SHOWN = 8


class Agreement(NamedTuple):
    """The seed of rank 0, and whether any other rank takes part."""

    seed: int
    others: bool


def agree_on_seed(own: list[Rng], agree: Callable[[Any], list[Any]], say: Callable[[str], None]) -> Agreement:
    """Give every rank one seed, and the user's generators the state they have on rank 0.

    The seed is drawn from torch's global generator, so `seed_everything` governs it; each rank draws, so that ranks
    whose generators agree go on agreeing. One rank alone draws nothing. Generators of different states are not an
    error: whichever is taken, the epoch is right, as with the seed; but it is said.
    """
    before = torch.get_rng_state()
    seed = int(torch.empty((), dtype=torch.int64).random_())
    votes = agree((seed, [rng.read() for rng in own]))
    if len(votes) == 1:
        torch.set_rng_state(before)
        return Agreement(seed, others=False)
    seed, states = votes[0]
    if any(len(other) != len(states) for _, other in votes):
        return Agreement(seed, others=True)  # samplers of different kinds: `agree_on_order` says so
    if any(list(map(digest, other)) != list(map(digest, states)) for _, other in votes):
        say(
            "The random generators of this loader's sampler differ between the ranks, which read one common order: "
            "that of rank 0's. Seed them alike to choose the order yourself."
        )
    for rng, state in zip(own, states, strict=True):
        rng.write(state)
    return Agreement(seed, others=True)


def agree_on_order(described: Mapping[str, Any], agree: Callable[[Any], list[Any]]) -> None:
    """Raise ValueError where the ranks were given different loaders."""
    votes: list[dict[str, Any]] = agree(dict(described))
    if any(vote != votes[0] for vote in votes):
        names = [name for name in votes[0] if any(vote[name] != votes[0][name] for vote in votes)]
        lines = [
            f"  rank {rank}: " + ", ".join(f"{name} {vote[name]}" for name in names) for rank, vote in enumerate(votes)
        ]
        raise ValueError(
            "The ranks were given different loaders, so that some samples would be read twice and others never:\n"
            + "\n".join(lines)
            + "\nBuild the same loader on every rank, or pass `use_distributed_sampler=False` where each rank reads "
            "data of its own."
        )


def describe(items: Iterable[Any], dataset: object, seed: int) -> dict[str, Any]:
    """What must be equal on all ranks, by the words that an error shows it with."""
    return {
        "dataset": type(dataset).__qualname__,
        "sampler": type(items).__qualname__,
        "length": length_of(items),
        "first indices": first_items(items, dataset, seed),
    }


def length_of(items: object) -> int | None:
    """The length of something, None where it has none."""
    try:
        return len(items)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def first_items(items: Iterable[Any], dataset: object, seed: int) -> str | None:
    """The first items that a copy of `items` yields, in words. None where it cannot be copied (a generator)."""
    try:
        duplicate = copy.deepcopy(items, {id(dataset): dataset})
    except (TypeError, NotImplementedError):
        return None
    with Streams(mix(seed, "compared"), []).drawing():
        first = list(islice(duplicate, NUM_COMPARED))
    shown = ", ".join(map(str, first[:NUM_SHOWN]))
    return f"[{shown}{', ...' if len(first) > NUM_SHOWN else ''}] ({mix(first):016x})"
