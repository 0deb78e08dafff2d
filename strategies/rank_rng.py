"""Different random numbers on ranks that read different data, once a model is set up.

Ranks seeded alike initialise equal weights. After that, dropout, noise and augmentation must differ between shares of
the data, and be equal on ranks that hold parts of one model. So at the first batch of a prepared loader after `setup`,
or the first forward, whichever is first, the generators of every share but the first are seeded from the state of
torch's generator and the share's index. The first share continues as plain PyTorch does. If a program later seeds all
ranks alike, the next batch or forward makes them differ again.
"""

from __future__ import annotations

from typing import final

import torch

from fabric.strategies.data.rng import digest, mix, process_rngs
from fabric.strategies.data.share import Share

_BITS = 48
_MARK = 0x5A4E
"""The upper bits of every seed made here. Generators keep their seed, also in a checkpoint; these bits show that a
restored generator must not be seeded again."""


@final
class RankRng:
    """Seeds the random generators of one rank, so that they differ between shares of the data."""

    def __init__(self) -> None:
        self.has_model = False
        """Whether a model is set up. Batches read before that, to build one, change nothing."""

    def diverge(self, share: Share) -> None:
        """Seed this rank's generators from its share, unless this was done before: that costs 0.2 us."""
        if share.index == 0 or not self.has_model or torch.initial_seed() >> _BITS == _MARK:
            return
        seed = mix("share", digest(torch.default_generator.get_state()), share.index) % 2**_BITS | _MARK << _BITS
        for rng in process_rngs()[1:]:
            rng.seed(seed)
        torch.manual_seed(seed)  # also seeds every device
