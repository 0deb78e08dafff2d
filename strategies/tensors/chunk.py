"""Rectangular chunks of a tensor: how a checkpoint describes shards, whichever strategy made them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

Shape: TypeAlias = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangular part of a tensor: `shape` elements along each dim, from `offsets` on."""

    offsets: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def intersection(self, other: "Chunk") -> "Chunk | None":
        """The elements that both contain; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, _stops(self), _stops(other))
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Chunk(starts, shape) if all(length > 0 for length in shape) else None

    def slices_in(self, outer: "Chunk") -> tuple[slice, ...]:
        """Index of this chunk in a tensor that holds the elements of `outer`."""
        return tuple(
            slice(start - origin, start - origin + length)
            for start, origin, length in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Chunk:
    """The chunk of all elements of a tensor."""
    return Chunk((0,) * len(shape), tuple(shape))


def chunks_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Chunk]:
    """The elements `[start, stop)` of the flattened tensor as chunks, in that order, at most `2 * ndim - 1` of them."""
    if start >= stop:
        return
    if not shape:
        yield Chunk((), ())
        return
    row = math.prod(shape[1:])
    first, past = -(-start // row), stop // row  # the complete rows
    if first > past:  # all within one row
        yield from _in_row(shape, past, start - past * row, stop - past * row)
        return
    if first * row > start:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if past > first:
        yield Chunk((first, *(0 for _ in shape[1:])), (past - first, *shape[1:]))
    if stop > past * row:
        yield from _in_row(shape, past, 0, stop - past * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Chunk]:
    for chunk in chunks_of_range(shape[1:], start, stop):
        yield Chunk((row, *chunk.offsets), (1, *chunk.shape))


def _stops(chunk: Chunk) -> Iterator[int]:
    return (start + length for start, length in zip(chunk.offsets, chunk.shape, strict=True))
