"""Every rank takes over the values of rank 0: of weights when a model is set up, of buffers while it trains."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import Collective

ALONE_BYTES = 2**20
"""From this size on a tensor travels alone: copying it into a flat one would cost more than a message."""


@torch.no_grad()
def follow_rank_zero(collective: Collective, tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values into the tensors of all ranks, in place. Ranks: all, with tensors of the same shapes.

    Small ones travel as one flat tensor per dtype.
    """
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            # .data: autograd may have saved the tensor, and ignores it
            tensor.data.copy_(collective.broadcast(tensor.detach().contiguous()))
        else:
            together.setdefault(tensor.dtype, []).append(tensor)
    for members in together.values():
        flat = collective.broadcast(torch.cat([tensor.detach().reshape(-1) for tensor in members]))
        parts = flat.split_with_sizes([tensor.numel() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            tensor.data.copy_(part.view_as(tensor))
