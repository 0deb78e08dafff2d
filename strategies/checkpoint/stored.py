"""Tensors of a checkpoint that is open for reading, whose bytes are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from copy import copy
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from fabric.strategies.checkpoint.values import DTYPES
from fabric.strategies.tensors.chunk import Chunk, Shape, whole
from fabric.strategies.tensors.nests import map_leaves
from fabric.strategies.tensors.wrapped import Wrapped, put_together

if TYPE_CHECKING:
    from fabric.strategies.checkpoint.manifest import Entry, Piece


@final
class Stored:
    """A tensor in a checkpoint. Its bytes are not read until they are needed."""

    def __init__(self, pointer: str, entry: Entry, open_file: Callable[[str], Tensor]) -> None:
        self.pointer = pointer
        self.shape: Shape = entry.shape
        self.dtype = DTYPES[entry.dtype]
        self._pieces = entry.pieces
        self._open_file = open_file

    @property
    def like(self) -> Tensor:
        """The tensor without its values, on the device "meta"."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def location(self) -> Hashable:
        """Where its bytes are: equal for tied tensors, which were saved once."""
        pieces = frozenset(each for each in self._pieces if each.chunk.numel)
        return (self.shape, self.dtype, pieces) if pieces else self.pointer

    def kept(self, chunk: Chunk) -> Tensor:
        """The elements of a chunk in new memory, to be kept."""
        made = torch.empty(chunk.shape, dtype=self.dtype)
        self.fill(made, chunk)
        return made

    def whole(self) -> Tensor:
        """The whole tensor, in new memory or mapped: to be copied from."""
        return self.part(whole(self.shape))

    def part(self, chunk: Chunk) -> Tensor:
        """The elements of a chunk: mapped if one piece contains them all, otherwise assembled. To be copied from."""
        for piece in self._pieces:
            if piece.chunk.intersection(chunk) == chunk:
                return self._elements(piece)[chunk.slices_in(piece.chunk)]
        return self.kept(chunk)

    @torch.no_grad()
    def fill(self, target: Tensor, chunk: Chunk) -> None:
        """Copy the elements of a chunk into `target`."""
        for piece in self._pieces:
            shared = piece.chunk.intersection(chunk)
            if shared is not None:
                target[shared.slices_in(chunk)].copy_(self._elements(piece)[shared.slices_in(piece.chunk)])

    def _elements(self, piece: Piece) -> Tensor:
        num_bytes = piece.chunk.numel * self.dtype.itemsize
        content = self._open_file(piece.file)[piece.offset_bytes : piece.offset_bytes + num_bytes]
        return content.view(self.dtype).view(piece.chunk.shape)


def in_memory(content: Any, *, mapped: bool = False) -> Any:
    """A nest with each `Stored` read whole: in new memory, or (`mapped`) mapped, to be copied from and dropped."""

    def read(leaf: Any) -> Any:
        if isinstance(leaf, Wrapped):
            return put_together(leaf, read)
        if not isinstance(leaf, Stored):
            return leaf
        return leaf.whole() if mapped else leaf.kept(whole(leaf.shape))

    return map_leaves(read, content, is_leaf=lambda leaf: isinstance(leaf, (Stored, Wrapped)))


def mapped_module(content: Any, *, but: Collection[str] = ()) -> Any:
    """The state of a module with its tensors mapped, for torch to copy from; `but`: names of entries that stay."""
    if not isinstance(content, dict):
        return in_memory(content, mapped=True)
    state = copy(content)
    for name, value in content.items():
        # What the module keeps is in memory.
        state[name] = value if name in but else in_memory(value, mapped=not is_extra_state(name))
    return state


def is_extra_state(name: str) -> bool:
    """Whether the entry is what a submodule's `get_extra_state` returned, of any type that can be saved."""
    return name.rpartition(".")[2] == "_extra_state"
