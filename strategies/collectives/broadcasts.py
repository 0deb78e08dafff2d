"""Broadcast from rank 0: of weights when a model is set up, of buffers while it trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.packing import flat, groups, put_back
from fabric.strategies.tensors.wrapped import plain_tensors


def broadcast_from_rank_zero(collective: Collective, tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors from rank 0, in place, small ones packed. Bypasses autograd, as `Collective.fill`.

    Ranks: all call it, with tensors of the same shapes in the same order.
    """
    sent = [
        plain
        for tensor in tensors
        for plain in ((tensor,) if type(tensor) is Tensor else plain_tensors(tensor).values())  # buffers: no call
    ]
    if not sent:  # most models have no buffers, and this is called in every forward
        return
    with torch.no_grad():
        together, alone = groups((each.nbytes for each in sent), (each.dtype for each in sent))
        packed = [[sent[index] for index in indices] for indices in together]
        flats = [flat(members) for members in packed]
        collective.fill([*flats, *(sent[index] for index in alone)])
        if collective.rank != 0:
            for values, members in zip(flats, packed, strict=True):
                put_back(values, members)


def buffers_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    """The current buffers of the modules themselves, not of their submodules. Not to be cached: a forward may
    assign another tensor (https://github.com/pytorch/pytorch/issues/63916)."""
    return list(dict.fromkeys(each for part in parts for each in part._buffers.values() if each is not None))
