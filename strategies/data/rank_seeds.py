"""Ranks with different shares of the data draw different random numbers.

Ranks seeded alike initialise equal weights and make equal data. After that, dropout, noise and augmentation must differ
between shares of the data, and be equal on ranks that hold parts of one model. So the generators diverge once. The
set-up of a model, or of a loader that splits data, finds which generators all ranks have in the same state. At the next
batch of a prepared loader, or the next forward, each share but the first seeds these generators from the common state
and its index. Seeds of the program remain if they differ by rank or are set after the set-up.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch

from fabric.strategies.data.partition import Share
from fabric.strategies.data.rng import digest, mix, process_rngs


@final
class GeneratorDivergence:
    """Makes the generators of ranks with different shares diverge."""

    def __init__(self) -> None:
        self._states: dict[str, bytes] = {}
        """The generators to seed, with digests of their common states."""
        self._seeded = (0, False)
        self.is_on = True
        """Whether generators are to diverge at all."""

    def compare(
        self, share: Share, num_ranks: int, start: Callable[[Sequence[float]], Callable[[], Sequence[float]]]
    ) -> None:
        """Find which generators are in the same state on all ranks. Ranks: all. `start`: see `Votes.start`."""
        if share.count == 1 or not self.is_on:
            return
        self._seeded = _seeded()
        rngs = process_rngs()
        states = {name: digest(rngs[name].read()) if name in rngs else b"" for name in ("torch", "python", "numpy")}
        mine = [zlib.crc32(state) for state in states.values()]
        equal = [total == number * num_ranks for number, total in zip(mine, start(mine)(), strict=True)]
        if share.index:
            found = zip(states.items(), equal, strict=True)
            self._states |= {name: state for (name, state), is_equal in found if is_equal and state}

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Context: if the generators diverge within, and their states are restored after it, they diverge again."""
        states = self._states
        yield
        self._states = states

    def diverge(self, share: Share) -> None:
        """Seed the generators that `compare` found. If the program has seeded torch's since, skip moved ones."""
        if not self._states:
            return
        states, self._states = self._states, {}
        is_seeded = _seeded() not in (self._seeded, (self._seeded[0], False))
        for name, state in states.items():
            rng, seed = process_rngs()[name], mix("share", state, share.index)
            if is_seeded and digest(rng.read()) != state:
                continue
            if name == "torch":
                torch.manual_seed(seed)  # also seeds every device
            else:
                rng.seed(seed)


def _seeded() -> tuple[int, bool]:
    """What torch's generator was seeded with last, and whether nothing was drawn since."""
    seed = torch.initial_seed()
    return seed, torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
