"""A tensor of the state, and the shards of it that this rank holds: what every strategy gives to be saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from fabric.strategies.tensors.chunk import Chunk, Shape, chunks_of_range, whole
from fabric.strategies.tensors.nests import map_only_tensors


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorShards:
    """One tensor of a model or an optimizer, as it is sharded or replicated over ranks."""

    shape: Shape
    """Of the whole tensor."""
    dtype: torch.dtype
    shards: tuple[tuple[Chunk, Tensor], ...]
    """The chunks that this rank holds, each with its elements, a tensor of the chunk's shape in the model's memory."""
    holders: tuple[int, ...]
    """The ranks that hold the same chunks, in ascending order. Each chunk is written by one of them."""

    @property
    def like(self) -> Tensor:
        """The whole tensor without its values, on the device "meta"."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def replicated(tensor: Tensor, holders: Sequence[int]) -> TensorShards:
    """A tensor that each of these ranks holds whole."""
    shape = tuple(tensor.shape)
    return TensorShards(shape, tensor.dtype, ((whole(shape), tensor.detach()),), tuple(holders))


def no_shards(shape: Sequence[int], dtype: torch.dtype) -> TensorShards:
    """A tensor of which this rank holds no shard."""
    return TensorShards(tuple(shape), dtype, (), ())


def of_rank(rank: int, nest: Any) -> Any:
    """A nest of plain values of one rank, with each tensor as one that only this rank holds, whole."""
    return map_only_tensors(lambda tensor: replicated(tensor, (rank,)), nest)


def of_other_rank(nest: Any) -> Any:
    """What the other ranks pass to `save` for it: no elements, few bytes to send."""
    return map_only_tensors(lambda tensor: no_shards(tensor.shape, tensor.dtype), nest)


def flat_shard(shape: Sequence[int], start: int, elements: Tensor, rank: int) -> TensorShards:
    """A tensor of which only this rank holds `elements`: 1-dim, from the index `start` of the flattened tensor on.

    Elements beyond the end are padding, which is not saved.
    """
    shape = tuple(shape)
    stop = min(start + elements.numel(), math.prod(shape))
    shards = []
    taken = 0
    for chunk in chunks_of_range(shape, start, stop):
        shards.append((chunk, elements.detach()[taken : taken + chunk.numel].view(chunk.shape)))
        taken += chunk.numel
    return TensorShards(shape, elements.dtype, tuple(shards), (rank,))
