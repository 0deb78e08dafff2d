"""Which part of the data a rank reads (`Share`), and what the data is for (`Use`). A strategy chooses both.

A share is not a rank: ranks that hold parts of one model (tensor parallel) have the same share.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

T = TypeVar("T")

Use: TypeAlias = Literal["train", "validate", "test", "predict"]
"""For `train` every rank has the same number of batches. For the others numbers may differ if the data requires it."""
Uneven: TypeAlias = Literal["stop", "repeat"]
"""What all ranks do when the first of them has no batch left: stop, or repeat their last batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part `index` of `count` equal parts."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """This share of `items`: contiguous, in order, and at most one longer than any other share."""
        size, longer = divmod(len(items), self.count)
        start = self.index * size + min(self.index, longer)
        return items[start : start + size + (self.index < longer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The number of shares that are read as one, and whether the samples of each batch are permuted."""

    count: int
    permuted: bool

    def order(self, samples: list[Any]) -> list[Any]:
        """The samples of a batch, permuted if asked for: by their number alone, so that a run can be repeated."""
        return random.Random(len(samples)).sample(samples, len(samples)) if self.permuted else samples

    def shares(self) -> list[Share]:
        """The shares, in the order of ranks."""
        return [Share(index=index, count=self.count) for index in range(self.count)]
