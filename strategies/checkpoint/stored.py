"""Tensors of a checkpoint that is open for reading, whose bytes are read when they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from copy import copy
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.checkpoint.storage import MAPPED
from fabric.strategies.checkpoint.values import DTYPES, are_integers
from fabric.strategies.tensors.chunk import Chunk, Shape, whole

if TYPE_CHECKING:
    from fabric.strategies.checkpoint.manifest import Entry, Piece
    from fabric.strategies.checkpoint.storage import Contents


@final
class Stored:
    """A tensor in a checkpoint. Its bytes are not read until they are needed.

    `maps`: `fill` and `kept` map the file where they can, instead of reading it.
    """

    def __init__(self, pointer: str, entry: Entry, open_file: Callable[[str], Contents], *, maps: bool = False) -> None:
        self.pointer, self.maps = pointer, maps
        self.shape: Shape = entry.shape
        self.dtype = DTYPES[entry.dtype]
        self._pieces = entry.pieces
        self._open_file = open_file

    def unmapped(self) -> Stored:
        """The same, to be read."""
        other = copy(self)
        other.maps = False
        return other

    @property
    def like(self) -> Tensor:
        """The tensor without its values, on the device "meta"."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def location(self) -> Hashable:
        """Where its bytes are: equal for tied tensors, which were saved once."""
        pieces = frozenset(each for each in self._pieces if each.chunk.numel)
        return (self.shape, self.dtype, pieces) if pieces else self.pointer

    def fill(self, target: Tensor, chunk: Chunk) -> None:
        """Give `target`, a tensor on its own and not a view, the elements of a chunk: by `copy_to`, or mapped."""
        fits = self.maps and _is_as_stored(target, self.dtype) and _may_move(target)
        mapped = self._mapped(chunk) if fits else None
        if mapped is None:
            self.copy_to(target.detach(), chunk)
        else:
            target.data = mapped

    def kept(self, chunk: Chunk) -> Tensor:
        """The elements of a chunk, to be kept: in new memory, or mapped."""
        mapped = self._mapped(chunk) if self.maps else None
        if mapped is not None:
            return mapped
        made = torch.empty(chunk.shape, dtype=self.dtype)
        self.copy_to(made, chunk)
        return made

    def whole(self) -> Tensor:
        """The whole tensor, in new memory or mapped: to be copied from."""
        return self.part(whole(self.shape))

    def part(self, chunk: Chunk) -> Tensor:
        """The elements of a chunk: mapped if one piece contains them all, otherwise assembled. To be copied from."""
        covering = self._covering(chunk)
        if covering is not None:
            return self._elements(covering)[chunk.slices_in(covering.chunk)]
        made = torch.empty(chunk.shape, dtype=self.dtype)
        self.copy_to(made, chunk)
        return made

    def copy_to(self, target: Tensor, chunk: Chunk) -> None:
        """Fill `target` with the elements of a chunk, copied directly from the files."""
        with torch.no_grad():
            for piece in self._pieces:
                shared = piece.chunk.intersection(chunk)
                if shared is None:
                    continue
                part = target[shared.slices_in(chunk)]
                # Rows of the piece are bytes that follow one another.
                if shared.shape[1:] == piece.chunk.shape[1:] and _is_as_stored(part, self.dtype):
                    self._open_file(piece.file).copy_to(
                        part, piece.offset_bytes + self._num_bytes_before(shared, piece)
                    )
                else:
                    part.copy_(self._elements(piece)[shared.slices_in(piece.chunk)])

    def _mapped(self, chunk: Chunk) -> Tensor | None:
        """The elements of a chunk, mapped; None unless they are rows of one piece."""
        piece = self._covering(chunk)
        # A single number is read: a page for each step count of an optimizer would be copied as it counts.
        if piece is None or chunk.shape[1:] != piece.chunk.shape[1:] or chunk.numel <= 1:
            return None
        offset = piece.offset_bytes + self._num_bytes_before(chunk, piece)
        if offset % self.dtype.itemsize:
            return None
        return self._open_file(piece.file).mapped(offset, self.dtype, chunk.shape, within=piece.offset_bytes)

    def _covering(self, chunk: Chunk) -> Piece | None:
        """The piece that has all elements of a chunk."""
        return next((piece for piece in self._pieces if piece.chunk.intersection(chunk) == chunk), None)

    def _num_bytes_before(self, rows: Chunk, piece: Piece) -> int:
        """The number of bytes of a piece before some of its rows."""
        if not rows.shape:
            return 0
        num_rows = rows.offsets[0] - piece.chunk.offsets[0]
        return num_rows * math.prod(rows.shape[1:]) * self.dtype.itemsize

    def _elements(self, piece: Piece) -> Tensor:
        num_bytes = piece.chunk.numel * self.dtype.itemsize
        content = self._open_file(piece.file).tensor[piece.offset_bytes : piece.offset_bytes + num_bytes]
        if piece.offset_bytes % self.dtype.itemsize:  # files of other libraries may not be aligned
            content = content.clone()
        return content.view(self.dtype).view(piece.chunk.shape)


def _is_as_stored(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the tensor's memory is what a file has: its elements in row-major order, on the CPU."""
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _may_move(tensor: Tensor) -> bool:
    """Whether a plain tensor may be given other memory: its own is no part of a larger one, of no array of NumPy, and
    not shared with other processes."""
    storage = tensor.untyped_storage()
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.grad_fn is None
        and storage.nbytes() == tensor.nbytes
        and (storage.resizable() or hasattr(storage, MAPPED))
        and not storage.is_shared()
        and not tensor.is_pinned()
    )


def unmapped(content: Any) -> Any:
    """The state of a module, none of which is mapped to be kept."""
    read = copy(content)
    for name, value in content.items():
        read[name] = value.unmapped() if isinstance(value, Stored) else value
    return read


def in_memory(content: Any, *, mapped: bool = False) -> Any:
    """A nest with each `Stored` read whole: to be kept, or (`mapped`) mapped, to be copied from and dropped.

    A single number is always in new memory, because optimizers keep the step that they load.
    """
    if isinstance(content, Stored):
        return content.whole() if mapped and math.prod(content.shape) > 1 else content.kept(whole(content.shape))
    if isinstance(content, dict):
        read = copy(content)  # keeps its class and attributes: torch stores `_metadata` on the state of a module
        for key, entry in content.items():
            read[key] = in_memory(entry, mapped=mapped)
        return read
    if type(content) in (list, tuple) and not are_integers(content):
        return type(content)(in_memory(entry, mapped=mapped) for entry in content)
    return content
