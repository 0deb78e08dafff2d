"""Many small tensors in few messages: what weights, buffers and gradients travel by when nobody else sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import Collective

ALONE_BYTES = 2**20
"""From this size on a tensor travels alone: copying it into a flat one would cost more than a message."""


@torch.no_grad()
def exchange(tensors: Iterable[Tensor], message: Callable[[Tensor], Tensor]) -> None:
    """Give each tensor, in place, what `message` makes of it elementwise. Small ones travel as one per dtype.

    Ranks: all that `message` talks to, with tensors of the same shapes in the same order.
    """
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            tensor.data.copy_(message(tensor.detach().contiguous()))
        else:
            together.setdefault(tensor.dtype, []).append(tensor)
    for members in together.values():
        put_back(message(torch.cat([tensor.detach().reshape(-1) for tensor in members])), members)


@torch.no_grad()
def follow(collective: Collective, tensors: Iterable[tuple[Tensor, int]]) -> None:
    """Give each tensor, in place, the values that it has on the rank it comes with. Small ones travel together.

    Ranks: all, with tensors of the same shapes in the same order. Past autograd, as `Collective.fill`.
    """
    alone: list[tuple[Tensor, int]] = []
    together: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for tensor, src in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            alone.append((tensor, src))
        else:
            together.setdefault((tensor.dtype, src), []).append(tensor)
    flats = [torch.cat([tensor.detach().reshape(-1) for tensor in members]) for members in together.values()]
    collective.fill([*flats, *(one for one, _ in alone)], [*(src for _, src in together), *(src for _, src in alone)])
    for flat, ((_, src), members) in zip(flats, together.items(), strict=True):
        if src != collective.rank:
            put_back(flat, members)


def put_back(flat: Tensor, members: list[Tensor]) -> None:
    """Copy the values of a flat tensor into those that it was made of. `.data`: autograd may have saved one, and
    ignores it."""
    parts = flat.split_with_sizes([tensor.numel() for tensor in members])
    for tensor, part in zip(members, parts, strict=True):
        tensor.data.copy_(part.view_as(tensor))
