"""Broadcast from rank 0: of weights when a model is set up, of buffers while it trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.fill import fill_from
from fabric.strategies.tensors.wrapped import plain_tensors


def broadcast_from_rank_zero(collective: Collective, tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors from rank 0, in place. Ranks: all call it, with tensors of the same shapes."""
    sent = [
        (plain, 0)
        for tensor in tensors
        for plain in ((tensor,) if type(tensor) is Tensor else plain_tensors(tensor).values())  # buffers: no call
    ]
    if sent:  # most models have no buffers, and this is called in every forward
        fill_from(collective, sent)


def buffers_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    """The current buffers of the modules themselves, not of their submodules. Not to be cached: a forward may
    assign another tensor (https://github.com/pytorch/pytorch/issues/63916)."""
    return list(dict.fromkeys(each for part in parts for each in part._buffers.values() if each is not None))
