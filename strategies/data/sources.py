"""What a prepared `DataLoader` reads in place of the user's sampler or dataset; nothing else of it is changed.

A `DataLoader` reads its batch sampler, or its sampler if it does no batching. `index_source` finds out which of the two
it reads, and its items; an `IndexSource` replaces that sampler, and yields this rank's share of the items. A
`SeededDataset` replaces a map-style dataset that workers read.

An iterable dataset has no sampler. Every rank reads the whole stream and keeps its share, unless the dataset can be
split: a `PreparedStream` reads the user's dataset, makes the batches, and yields the batches of its rank. It runs
in each worker, over the part of the stream that the user's code gives to that worker.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, islice
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from fabric.strategies.data import huggingface
from fabric.strategies.data.comparison import is_torchs
from fabric.strategies.data.cursor import Cursor
from fabric.strategies.data.epochs import Epoch, Order
from fabric.strategies.data.joined import of_all_shares
from fabric.strategies.data.partition import BatchCut, Cut, Joined, SampleCut, Share, once
from fabric.strategies.data.rng import mix, seed_process
from fabric.strategies.data.token_batches import TokenStream

MOST_STEPS = 64


@final
@dataclass(eq=False, repr=False)
class IndexSource:
    """One rank's share of the items that a sampler yields. Delegates other attributes to the sampler."""

    _replaced: Iterable[Any]
    items: Iterable[Any]
    _cut: Cut
    _order: Order
    _: KW_ONLY
    most_steps: int
    """How many may be drawn at a time."""
    eager: bool = False
    """Whether `iter` is called on the items when the iteration begins."""
    is_seeded: bool = False
    """Whether each batch has a seed of its own: `SeededDataset`."""
    resumes: bool = False
    """Whether the items resume at their own position, so that none is skipped."""
    joined: Joined | None = None
    """For a process that reads in place of several ranks."""
    read: bool = False
    """Whether a loader has asked for indices."""

    def __iter__(self) -> Iterator[Any]:
        self.read = True
        epoch, cut = self._order.begin(), self.cut
        items = epoch.draw(self.items, cut.reads, most_steps=self.most_steps, eager=self.eager)
        begun_at = epoch.begun_at.at_start() if self.resumes else epoch.begun_at
        return chain.from_iterable(self._batches(epoch, items, cut, begun_at))

    def __len__(self) -> int:
        return self.cut.length(len(self.items))  # type: ignore[arg-type]

    @property
    def cut(self) -> Cut:
        """How an epoch that begins now is divided: a loop may change `batch_size` of the batch sampler meanwhile."""
        cut, batches = self._cut, self._replaced
        if isinstance(cut, SampleCut) and cut.batch_size is not None and isinstance(batches, BatchSampler):
            cut = replace(cut, batch_size=batches.batch_size, drop_last=batches.drop_last)
        return of_all_shares(cut, self.joined)

    def _batches(self, epoch: Epoch, items: Iterator[Any], cut: Cut, begun_at: Cursor) -> Iterator[Iterable[Any]]:
        """The batches after `begun_at`, some at a time. Indices before it are drawn, and no sample is loaded."""
        items = cut.skip(items, begun_at.start) if begun_at.start else items
        parts, end = cut(items), begun_at.start
        for part in islice(parts, begun_at.batches):
            end = begun_at.start + part.end
        if end != max(begun_at.samples, begun_at.start):
            raise ValueError(
                f"The checkpoint was taken after {begun_at.samples} samples of the epoch in {begun_at.batches} batches "
                f"per rank; here these batches have {end}. Construct the same loader, or start a new epoch with "
                "`set_epoch`."
            )
        ahead = list(islice(parts, epoch.num_ahead))
        if not self._order.is_shared:
            epoch.rngs.release()
        parts, num_steps = chain(ahead, parts), 1
        while group := list(islice(parts, num_steps)):
            num_steps = min(2 * num_steps, self.most_steps)
            epoch.fetch(group)
            if self.is_seeded:
                yield (Seeded(part.batch, epoch.seed_of_batch(part.end)) for part in group)
            else:
                yield [part.batch for part in group]

    def __getattr__(self, name: str) -> Any:
        # Indices are read ahead, so the sampler's state is ahead of the loop: stateful loaders count batches instead.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._replaced, name)


def index_source(
    loader: DataLoader[Any], share: Share, uneven: bool, order: Order, *, is_seeded: bool
) -> tuple[str, IndexSource]:
    """The attribute to replace on the copy of a map-style loader (`sampler`, `batch_sampler`), and its new value."""
    name, items = indices_of(loader)
    replaced = getattr(loader, name)
    cut: Cut = SampleCut(share=share, uneven=uneven)
    if isinstance(replaced, BatchSampler) and items is replaced.sampler:
        cut = SampleCut(share=share, uneven=uneven, batch_size=replaced.batch_size, drop_last=replaced.drop_last)
    elif name == "batch_sampler":
        cut = BatchCut(share=share, uneven=uneven)
    # In one process a sampler that may draw later is not read ahead of the loop, as in plain PyTorch.
    most_steps = MOST_STEPS if order.is_shared or (is_torchs(items) and not order.own) else 1
    eager = type(replaced) is not BatchSampler  # which iterates its sampler after the seed of the workers is drawn
    source = IndexSource(replaced, items, cut, order, most_steps=most_steps, eager=eager, is_seeded=is_seeded)
    return name, source


def indices_of(loader: DataLoader[Any]) -> tuple[str, Iterable[Any]]:
    """The attribute from which a map-style loader reads its indices, and the items that are distributed over ranks.

    With torch's own `BatchSampler` the items are single samples. The batches of a custom batch sampler are distributed
    whole, because the batch sampler decides what is in a batch. Without batching, the sampler's items are distributed.
    """
    batches = loader.batch_sampler
    if batches is None:
        return "sampler", loader.sampler
    if isinstance(batches, BatchSampler) and (loader.batch_size is not None or type(batches) is BatchSampler):
        return "batch_sampler", batches.sampler
    return "batch_sampler", batches


@final
@dataclass(frozen=True, slots=True)
class Seeded:
    """An index or the indices of a batch, with a seed."""

    value: Any
    seed: int


@final
class SeededDataset(Dataset[Any]):
    """The user's map-style dataset; seeds the worker's generators before it loads. Delegates other attributes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[_seeded(index)]

    def __getitems__(self, indices: Any) -> Any:
        indices = _seeded(indices)
        load = getattr(self.dataset, "__getitems__", None)
        return load(indices) if load else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dataset":
            object.__setattr__(self, name, value)
        else:  # a `worker_init_fn` that writes to `get_worker_info().dataset`
            setattr(self.dataset, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _seeded(indices: Any) -> Any:
    """The plain indices; seeds the generators of the process if they carry a seed."""
    if not isinstance(indices, Seeded):
        return indices
    seed_process(indices.seed)
    return indices.value


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
    """Sets the part's epoch to the epoch of the whole dataset."""


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
    beginning of each epoch: persistent workers would keep their states, and a resumed run starts new workers.
    """

    def __init__(
        self, dataset: Iterable[Any], cut: Cut | None, *, order: Order | None = None, is_reseeded: bool = False
    ) -> None:
        self.dataset, self.cut, self.order, self.is_reseeded = dataset, cut, order, is_reseeded
        self.seed, self.start = torch.zeros(2, dtype=torch.int64).unbind()
        """Of the epoch that workers begin next, and the items before its first one, which another run has read."""
        if is_reseeded:
            self.seed.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        tokens = self.dataset if isinstance(self.dataset, TokenStream) else None
        number, count = (0, 1) if tokens is None else tokens.enter_worker()
        info = get_worker_info()
        if info is not None and self.is_reseeded:
            seed_process(mix(int(self.seed), info.id))
        if self.cut is None:
            return iter(self.dataset)
        if self.order is None:
            items = once(iter(self.dataset) if tokens is None else tokens.batches())
            parts = islice(self.cut(islice(items, int(self.start), None)), number, None, count)
            return (part.batch for part in parts)
        epoch = self.order.begin()
        items = epoch.draw(self.dataset, self.cut.reads, most_steps=1, eager=True)
        return (part.batch for part in self.cut(islice(items, epoch.begun_at.start, None)))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def announce(self, epoch: Epoch) -> None:
        """Called in the process that iterates, not in a worker, before torch draws the seed of the workers."""
        if self.order is None:
            epoch.rngs.begin()
        self.start.fill_(epoch.begun_at.start)
        if self.is_reseeded:
            self.seed.fill_(mix("stream", epoch.seed, epoch.number))
