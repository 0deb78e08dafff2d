"""Tensors that a rank overwrites with those of another, the small ones packed into one message."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.packing import flat, groups, put_back


@torch.no_grad()
def fill_from(collective: Collective, tensors: Iterable[tuple[Tensor, int]]) -> None:
    """Overwrite each tensor with its values on the given rank. Small tensors are packed.

    Ranks: all, with tensors of the same shapes in the same order. Bypasses autograd, as `Collective.fill`.
    """
    given = list(tensors)
    together, alone = groups((one.nbytes for one, _ in given), ((one.dtype, src) for one, src in given))
    packed = [([given[index][0] for index in indices], given[indices[0]][1]) for indices in together]
    flats = [flat(members) for members, _ in packed]
    collective.fill(
        [*flats, *(given[index][0] for index in alone)],
        [*(src for _, src in packed), *(given[index][1] for index in alone)],
    )
    for packed_values, (members, src) in zip(flats, packed, strict=True):
        if src != collective.rank:
            put_back(packed_values, members)
