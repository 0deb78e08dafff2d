"""Random numbers of the process that differ from rank to rank once a model is set up.

Ranks that were seeded alike make equal weights. Then dropout, noise and augmentation want numbers of their own on each
share of the data, and the same ones on ranks that hold parts of one model. So with the first batch of a prepared
loader after `setup`, or the first forward, whichever comes first, the generators of every share but the first are
seeded from where torch's generator stands and from the share. The first share goes on as one process of plain PyTorch
does. A program that seeds all ranks alike later, by any call, finds them apart again at the next batch or forward.
"""

from __future__ import annotations

from typing import final

import torch

from fabric.strategies.data.rng import digest, mix, process_rngs
from fabric.strategies.data.share import Share

_BITS = 48
_MARK = 0x5A4E
"""The upper bits of every seed made here. Generators keep their seed, also in a checkpoint, so it tells which they are:
what was restored is not seeded again."""


@final
class RandomStreams:
    """The generators of one rank."""

    def __init__(self) -> None:
        self.has_model = False
        """Whether a model is set up. A batch that is looked at before, to make one, changes nothing."""

    def differ(self, share: Share) -> None:
        """Let this rank draw as its share does. Costs 0.2 us where it does already."""
        if share.index == 0 or not self.has_model or torch.initial_seed() >> _BITS == _MARK:
            return
        seed = mix("share", digest(torch.default_generator.get_state()), share.index) % 2**_BITS | _MARK << _BITS
        for rng in process_rngs()[1:]:
            rng.seed(seed)
        torch.manual_seed(seed)  # of every device
