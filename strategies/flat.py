"""Many small tensors in few messages: what weights, buffers and gradients travel by when nobody else sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

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
            received = message(tensor.detach().contiguous())
            if received.data_ptr() != tensor.data_ptr():  # whoever sent has it already
                tensor.data.copy_(received)  # .data: autograd may have saved the tensor, and ignores it
        else:
            together.setdefault(tensor.dtype, []).append(tensor)
    for members in together.values():
        flat = message(torch.cat([tensor.detach().reshape(-1) for tensor in members]))
        parts = flat.split_with_sizes([tensor.numel() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            tensor.data.copy_(part.view_as(tensor))
