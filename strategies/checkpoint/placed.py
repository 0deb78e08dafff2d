"""A tensor of the state, and the part of it that this rank holds: what every strategy's state is written from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fabric.strategies.checkpoint.box import Box, Shape, boxes_of_range, whole


@final
@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """One tensor of a model or an optimizer, as it is sharded over the ranks."""

    shape: Shape
    """Of the whole tensor."""
    dtype: torch.dtype
    parts: tuple[tuple[Box, Tensor], ...]
    """What this rank holds: each box with its elements, a tensor of the box's shape. Shares the model's memory."""
    holders: tuple[int, ...]
    """The ranks that hold these same parts, in ascending order. One of them writes a part."""

    @property
    def like(self) -> Tensor:
        """The whole tensor without its values, on the device "meta"."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def on_ranks(tensor: Tensor, holders: Sequence[int]) -> Placed:
    """A tensor that each of these ranks has whole."""
    shape = tuple(tensor.shape)
    return Placed(shape, tensor.dtype, ((whole(shape), tensor.detach()),), tuple(holders))


def elsewhere(shape: Sequence[int], dtype: torch.dtype) -> Placed:
    """A tensor of which this rank holds nothing."""
    return Placed(tuple(shape), dtype, (), ())


def range_of(shape: Sequence[int], start: int, elements: Tensor, rank: int) -> Placed:
    """A tensor of which this rank alone holds `elements`, of one dim, from the element `start` of the flattened whole.

    Elements beyond the end are padding, which is in no checkpoint.
    """
    shape = tuple(shape)
    stop = min(start + elements.numel(), math.prod(shape))
    parts = []
    taken = 0
    for box in boxes_of_range(shape, start, stop):
        parts.append((box, elements.detach()[taken : taken + box.numel].view(box.shape)))
        taken += box.numel
    return Placed(shape, elements.dtype, tuple(parts), (rank,))
