"""Every rank takes over the values of rank 0: of weights when a model is set up, of buffers while it trains."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.flat import follow


def follow_rank_zero(collective: Collective, tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values into the tensors of all ranks, in place. Ranks: all, with tensors of the same shapes."""
    follow(collective, ((tensor, 0) for tensor in tensors))
