"""What one process reads in place of several ranks: the batches of all ranks in one step as one batch.

For `fabric verify`, whose reference is a run of one process over the global batches. The samples of a step are joined
in the order of ranks, before the user's `collate_fn`; ready batches (`batch_size=None`, a list) are concatenated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, tee, zip_longest
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from fabric.strategies.data.partition import Cut, Joined, Part, Share, once
from fabric.strategies.tensors.nests import opened


@final
@dataclass(frozen=True, kw_only=True)
class JoinedCut(Cut):
    """The batches of all shares of `cut` in a step as one batch."""

    cut: Cut
    joined: Joined

    @property
    def reads(self) -> tuple[int, int]:
        return self.cut.reads

    def __call__(self, items: Iterator[Any]) -> Iterator[Part]:
        cuts = [replace(self.cut, share=share) for share in self.joined.shares()]
        steps = zip_longest(*(cut(own) for cut, own in zip(cuts, tee(items, len(cuts)), strict=True)))
        for parts in steps:
            present: list[Part] = [part for part in parts if part is not None]
            samples = [sample for part in present for sample in part.batch]
            yield Part(self.joined.order(samples), present[0].end)

    def length(self, num_items: int) -> int:
        return replace(self.cut, share=self.joined.shares()[0]).length(num_items)

    def refuse(self, num_items: int) -> str | None:
        return self.cut.refuse(num_items)


def of_all_shares(cut: Cut, joined: Joined | None) -> Cut:
    """The cut; of all shares in one batch, for a process that reads in place of several ranks."""
    return cut if joined is None else JoinedCut(share=Share(), uneven=cut.uneven, cut=cut, joined=joined)


@final
class JoinedStream(IterableDataset[Any]):
    """Batches of samples from several parts of a stream, which ranks would read: until the first part ends."""

    def __init__(self, parts: Sequence[Iterable[Any]], batch_size: int, joined: Joined) -> None:
        self.parts, self.batch_size, self.joined = parts, batch_size, joined

    def __iter__(self) -> Iterator[Any]:
        streams = [once(iter(part)) for part in self.parts]
        while all(read := [list(islice(stream, self.batch_size)) for stream in streams]):
            yield self.joined.order([sample for samples in read for sample in samples])


@final
class JoinedBatches:
    """Ready batches of a loader, as many at a time as there are ranks, concatenated along the first dimension."""

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        self.loader, self.count = loader, count

    def __iter__(self) -> Iterator[Any]:
        batches = once(iter(self.loader))
        while len(step := list(islice(batches, self.count))) == self.count:
            yield concatenated(step)

    def __len__(self) -> int:
        return len(self.loader) // self.count  # type: ignore[arg-type]


def concatenated(batches: Sequence[Any]) -> Any:
    """Batches of one structure as one batch. Raises: TypeError: a leaf is no tensor with dimensions, and no list."""
    first = batches[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(batches))
    if isinstance(first, (list, str)) and not any(isinstance(each, Tensor) for each in first):
        return sum(batches, type(first)())
    container = opened(first)
    if container is None:
        raise TypeError(
            f"`fabric verify` joins the ready batches of the ranks along the first dimension, and a batch holds a "
            f"`{type(first).__name__}`. Let a `DataLoader` with a `batch_size` make the batches."
        )
    rebuild: Callable[[list[Any]], Any] = container[3]
    members = [opened(each)[2] for each in batches]  # type: ignore[index]
    return rebuild([concatenated(each) for each in zip(*members, strict=True)])
