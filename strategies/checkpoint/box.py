"""Rectangular parts of a tensor: how shards are named in a checkpoint, whichever strategy cut them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

Shape: TypeAlias = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor from `offsets` on, `shape` of them along each dim. Without dims: the one element."""

    offsets: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """What both contain; None if that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, _stops(self), _stops(other))
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, shape) if all(length > 0 for length in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds the elements of `outer`."""
        return tuple(
            slice(start - origin, start - origin + length)
            for start, origin, length in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements `[start, stop)` of the flattened tensor, as boxes in that order, at most `2 * ndim - 1` of them."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, past = -(-start // row), stop // row  # the whole rows
    if first > past:  # all within one row
        yield from _in_row(shape, past, start - past * row, stop - past * row)
        return
    if first * row > start:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if past > first:
        yield Box((first, *(0 for _ in shape[1:])), (past - first, *shape[1:]))
    if stop > past * row:
        yield from _in_row(shape, past, 0, stop - past * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.shape))


def _stops(box: Box) -> Iterator[int]:
    return (start + length for start, length in zip(box.offsets, box.shape, strict=True))
