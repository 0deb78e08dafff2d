"""Iterable datasets: every rank reads the whole stream and keeps its share, unless the dataset can be split.

An iterable dataset has no sampler to replace, so the copy of the loader gets another dataset: a `PreparedStream` reads
the user's dataset, makes the batches, and yields those of its rank. It runs in each worker, over the part of the
stream that the user's code gives to that worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch.utils.data import IterableDataset, get_worker_info

from fabric.strategies.data import huggingface
from fabric.strategies.data.epochs import Epoch, Order
from fabric.strategies.data.partition import Cut
from fabric.strategies.data.positions import once
from fabric.strategies.data.rng import mix, seed_process
from fabric.strategies.data.share import Share


@runtime_checkable
class Shardable(Protocol):
    """An iterable dataset that can be split."""

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Part `index` of `num_shards` disjoint parts, which together have all samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStream:
    """The part of an iterable dataset that one rank reads."""

    words: str
    """The function that made the part, as an error names it."""
    part: Iterable[Any]
    set_epoch: Callable[[], None] = lambda: None
    """Sets the epoch of the part to that of the whole dataset."""


def split_stream(dataset: IterableDataset[Any], share: Share) -> SplitStream | str:
    """The part of `dataset` that a rank reads; a warning if it cannot be split into equal parts."""
    name, count = type(dataset).__name__, share.count
    if huggingface.is_iterable(dataset):
        num_shards: int = dataset.num_shards  # type: ignore[attr-defined]
        if num_shards % count == 0:
            part, set_epoch = huggingface.split(dataset, count, share.index)
            return SplitStream(words="split_dataset_by_node", part=part, set_epoch=set_epoch)
        return (
            f"`{name}` has num_shards={num_shards}, which {count} ranks cannot share evenly, so each of them reads all "
            f"of it and keeps its share. Give it a multiple of {count} shards to read each sample once."
        )
    if isinstance(dataset, Shardable):
        return SplitStream(words=f"{name}.shard", part=dataset.shard(num_shards=count, index=share.index))
    return (
        f"`{name}` cannot be read in parts, so each of the {count} ranks reads all of it and keeps its share. Give it "
        "`shard(num_shards, index)`, which returns a part, to read each sample once."
    )


@final
class PreparedStream(IterableDataset[Any]):
    """The user's iterable dataset as one rank reads it.

    `cut`: yields this rank's batches, before `collate_fn`, of a stream that all ranks read; None: all samples. `order`:
    what a stream that is read without workers draws from. `is_reseeded`: seeds the generators of workers at the
    beginning of each epoch: persistent ones would keep theirs, and a resumed run starts new workers.
    """

    def __init__(
        self, dataset: Iterable[Any], cut: Cut | None, *, order: Order | None = None, is_reseeded: bool = False
    ) -> None:
        self.dataset, self.cut, self.order, self.is_reseeded = dataset, cut, order, is_reseeded
        self.seed = torch.zeros((), dtype=torch.int64)
        """Of the epoch that workers begin next."""
        if is_reseeded:
            self.seed.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and self.is_reseeded:
            seed_process(mix(int(self.seed), info.id))
        if self.cut is None:
            return iter(self.dataset)
        if self.order is None:
            return (part.batch for part in self.cut(once(iter(self.dataset))))
        items = self.order.begin().draw(self.dataset, self.cut.reads, most_steps=1, eager=True)
        return (part.batch for part in self.cut(items))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def announce(self, epoch: Epoch) -> None:
        """Called in the process that iterates, not in a worker, before torch draws the seed of the workers."""
        if self.order is None:
            epoch.streams.begin()
        if self.is_reseeded:
            self.seed.fill_(mix("stream", epoch.seed, epoch.number))
