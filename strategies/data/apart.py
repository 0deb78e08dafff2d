"""Different random numbers on ranks that read different data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from fabric.strategies.data.rng import digest, mix, process_rngs
from fabric.strategies.data.share import Share


def draw_apart(share: Share, num_ranks: int, start: Callable[[Sequence[float]], Callable[[], Sequence[float]]]) -> None:
    """Seed each generator that all ranks have in the same state from that state and the share.

    Ranks seeded alike initialise equal weights. After that, dropout, noise and augmentation must differ between shares
    of the data, and be equal on ranks that hold parts of one model. The first share goes on as one process does. Where
    generators differ already, the program has seeded them by rank. Ranks: all call it. `start`: as `Votes.start`.
    """
    rngs = process_rngs()
    states = {name: digest(rngs[name].read()) if name in rngs else b"" for name in ("torch", "python", "numpy")}
    mine = [zlib.crc32(state) for state in states.values()]
    for (name, state), number, total in zip(states.items(), mine, start(mine)(), strict=True):
        if share.index == 0 or total != number * num_ranks or not state:
            continue
        seed = mix("share", state, share.index)
        if name == "torch":
            torch.manual_seed(seed)  # also seeds every device
        else:
            rngs[name].seed(seed)
