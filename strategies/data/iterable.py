"""Iterable datasets: every rank reads the whole stream and keeps its share, unless the dataset can be split.

An iterable dataset has no sampler to replace, so the copy of the loader gets another dataset: a `SharedStream` reads
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
from fabric.strategies.data.epochs import Drawn
from fabric.strategies.data.partition import Cut
from fabric.strategies.data.rng import Streams, mix, process_rngs
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
class SharedStream(IterableDataset[Any]):
    """One rank's batches of the user's iterable dataset, before `collate_fn`.

    Random numbers depend on seed, epoch and worker only, so that all ranks read the same stream.
    """

    def __init__(self, dataset: IterableDataset[Any], cut: Cut, seed: int) -> None:
        self.dataset, self.cut = dataset, cut
        self.announced = torch.tensor([seed, 0])
        """The seed, and the epoch of the next iteration. In shared memory if workers are persistent."""

    def __iter__(self) -> Iterator[Any]:
        seed, epoch = self.announced.tolist()
        info = get_worker_info()
        streams = Streams(mix(seed, epoch, "stream", info.id if info else 0))
        return (part.batch for part in self.cut(iter(Drawn(self.dataset, streams, self.cut.reads))))

    def announce(self, seed: int, epoch: int) -> None:
        """Set the epoch of the next iteration. Called in the process that iterates, not in a worker."""
        self.announced.copy_(torch.tensor([seed, epoch]))


@final
class ReseededStream(IterableDataset[Any]):
    """The user's iterable dataset, in persistent workers: seeds the worker's generators at the beginning of each epoch.

    Persistent workers would keep their generators from epoch to epoch, and a resumed run starts new workers.
    """

    def __init__(self, dataset: Iterable[Any], reader: int) -> None:
        """`reader`: makes the random numbers of this rank's workers differ from those of other ranks."""
        self.dataset, self.reader = dataset, reader
        self.announced = torch.zeros(2, dtype=torch.int64)
        """The seed, and the epoch of the next iteration."""
        self.announced.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None:
            seed = mix(*self.announced.tolist(), "part", self.reader, info.id)
            for rng in process_rngs():
                rng.seed(seed)
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def announce(self, seed: int, epoch: int) -> None:
        """As `SharedStream.announce`."""
        self.announced.copy_(torch.tensor([seed, epoch]))
