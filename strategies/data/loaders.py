"""What a strategy does to a loader: cut it to this rank's share, move its batches, leave the user's object alone.

A loader is never made anew from guessed arguments. A shallow copy of it reads from another source: of indices where
it has a sampler, of samples where its dataset is a stream. What cannot be shared out is an error here, before
anything is read. Set-up calls collectives (`agree`), two or three times; iterating calls none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabric.strategies.data.advice import advice, loading_of
from fabric.strategies.data.agreement import agree_on_order, agree_on_seed, describe, length_of
from fabric.strategies.data.cut import Cut, LeaveOut, SampleCut, TurnCut
from fabric.strategies.data.device_loader import DeviceLoader, Epochal, Reading, Stateful
from fabric.strategies.data.indices import MAX_CHUNKS, IndexSource, index_source
from fabric.strategies.data.order import Order
from fabric.strategies.data.randomness import own_rngs
from fabric.strategies.data.sharded import is_sharded, refuse_pipe
from fabric.strategies.data.share import Share, Use
from fabric.strategies.data.streams import Collate, Shardable, SharedStream
from fabric.strategies.data.transfer import Carry, has_streams, one_ahead, one_by_one
from fabric.strategies.data.workers import WorkerStart

__all__ = ["DeviceLoader", "Share", "Use", "process_dataloader"]


def process_dataloader(
    loader: Iterable[Any],
    use: Use,
    *,
    share: Share,
    device: torch.device,
    distribute: bool,
    move: bool,
    launcher: str,
    agree: Callable[[Any], list[Any]],
    say: Callable[[str], None],
    carry: Carry | None = None,
) -> DeviceLoader:
    """The loader, cut to this rank's share (`distribute`), its batches on `device` (`move`).

    Ranks: all that read parts of the same data call it, with the same loader. One rank alone gets plain PyTorch: the
    same order from the same random numbers. A sampler that already shares (`DistributedSampler`) is left as it is.
    `agree(obj)` gives every rank the objects of all that call it; `say` shows a warning, on one rank. `carry`: how the
    batches go to the device, where it has a way of its own.
    Raises: ValueError: the data cannot be shared out, or the ranks were given different loaders.
    """
    if isinstance(loader, DeviceLoader):
        raise ValueError("`setup_dataloaders` was given a loader that it returned before. Pass the original loader.")
    if not isinstance(loader, Iterable):
        raise TypeError(f"`setup_dataloaders` was given a `{type(loader).__name__}`, which cannot be iterated.")
    ranks = _Ranks(share, use != "train", agree, say)
    accelerated = move and device.type != "cpu"
    # Ahead only of what is at hand: an iterable may depend on the loop, and a stateful loader counts what was fetched.
    ahead = isinstance(loader, DataLoader) and not isinstance(loader, Stateful) and has_streams(device)
    if isinstance(loader, DataLoader):
        sentence = advice(loading_of(loader, launcher=launcher, accelerated=accelerated))
        if sentence is not None:
            say(sentence)
        reading = _shared(loader, ranks) if distribute and not is_sharded(loader, share) else _whole(loader, share)
    else:
        reading = (
            _shared_iterable(loader, ranks) if distribute else Reading(source=loader, epochal=_epochal(loader, loader))
        )
    carry = carry or (one_ahead if ahead else one_by_one)
    return DeviceLoader(loader, replace(reading, device=device if accelerated else None, carry=carry))


@dataclass(frozen=True, slots=True)
class _Ranks:
    share: Share
    uneven: bool
    agree: Callable[[Any], list[Any]]
    say: Callable[[str], None]

    def alone(self, others: bool) -> bool:
        return self.share.count == 1 and not others


def _whole(loader: DataLoader[Any], share: Share) -> Reading:
    """The loader as the user made it; what changes is how its workers start."""
    if loader.num_workers == 0:
        return Reading(source=loader, epochal=_epochal(loader, loader))
    start = WorkerStart(share.index, loader.worker_init_fn)
    source = _copy(loader, worker_init_fn=start)
    return Reading(source=source, start=start, epochal=_epochal(loader, source))


def _shared(loader: DataLoader[Any], ranks: _Ranks) -> Reading:
    own = own_rngs(loader)
    seed, others = agree_on_seed(own, ranks.agree, ranks.say)
    if ranks.alone(others):
        return _whole(loader, ranks.share)
    if isinstance(loader.dataset, IterableDataset):
        return _shared_stream(loader, loader.dataset, ranks, seed)
    order = Order(seed, own)
    name, index = index_source(loader, ranks.share, ranks.uneven, order, _left_out(ranks))
    agree_on_order(
        describe(index.items, loader.dataset, seed) | {"batch size": loader.batch_size, "drop_last": loader.drop_last},
        ranks.agree,
    )
    _refuse(index.cut, index.items)
    start = WorkerStart(ranks.share.index, loader.worker_init_fn)
    source = _copy(loader, worker_init_fn=start, **{name: index})
    return Reading(source=source, order=order, index=index, start=start, epochal=_epochal(loader, source))


def _shared_stream(loader: DataLoader[Any], dataset: IterableDataset[Any], ranks: _Ranks, seed: int) -> Reading:
    refuse_pipe(dataset)
    share, batch_size = ranks.share, loader.batch_size
    described = {
        "dataset": type(dataset).__qualname__,
        "length": length_of(dataset),
        "batch size": batch_size,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
    }
    agree_on_order(described, ranks.agree)
    start = WorkerStart(share.index, loader.worker_init_fn)
    if isinstance(dataset, Shardable) and share.count > 1:
        return _own_shard(loader, dataset, ranks, start)
    if share.count > 1:
        ranks.say(
            f"`{type(dataset).__name__}` cannot be read in parts, so each of the {share.count} ranks reads all of it "
            "and keeps its share. Give it `shard(num_shards, index)`, which returns a part, to read each sample once."
        )
    cut: Cut = TurnCut(share=share, uneven=ranks.uneven)
    if batch_size is not None:
        cut = SampleCut(share=share, uneven=ranks.uneven, batch_size=batch_size, drop_last=loader.drop_last)
    order = Order(seed, [])
    stream = SharedStream(dataset, cut, seed)
    if loader.persistent_workers:
        stream.live_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    parts = {"dataset": stream, "batch_sampler": None, "collate_fn": Collate(loader.collate_fn)}
    source = _copy(loader, worker_init_fn=start, **parts)
    return Reading(
        source=source,
        order=order,
        stream=stream,
        start=start,
        epochal=_epochal(loader, source),
        leave_out=_left_out(ranks),
    )


def _own_shard(loader: DataLoader[Any], dataset: Shardable, ranks: _Ranks, start: WorkerStart) -> Reading:
    share = ranks.share
    shard = dataset.shard(num_shards=share.count, index=share.index)
    source = _copy(loader, worker_init_fn=start, dataset=shard)
    lengths = ranks.agree(length_of(source))
    if not ranks.uneven and len(set(lengths)) > 1:
        raise ValueError(
            f"`{type(dataset).__name__}.shard` gives the {share.count} ranks {', '.join(map(str, lengths))} batches, "
            "and each rank trains on as many as any other. Pass `drop_last=True`, or make the shards equal."
        )
    if not ranks.uneven and None in lengths:
        ranks.say(
            f"Each rank reads its own shard of `{type(dataset).__name__}`, whose length is unknown. If the shards hold "
            "different numbers of batches, stop all ranks at the same step."
        )
    return Reading(source=source, start=start, epochal=_epochal(source, source))


def _shared_iterable(items: Iterable[Any], ranks: _Ranks) -> Reading:
    seed, others = agree_on_seed([], ranks.agree, ranks.say)
    if ranks.alone(others):
        return Reading(source=items, epochal=_epochal(items, items))
    agree_on_order({"loader": type(items).__qualname__, "length": length_of(items)}, ranks.agree)
    cut = TurnCut(share=ranks.share, uneven=ranks.uneven)
    _refuse(cut, items)
    order = Order(seed, [])
    chunks = MAX_CHUNKS if isinstance(items, (list, tuple)) else 1  # what is not at hand is not read ahead
    index = IndexSource(items, items, cut, order, _left_out(ranks), chunks=chunks, eager=True)
    return Reading(source=index, order=order, index=index, epochal=_epochal(items, items))


def _copy(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """The user's loader with other parts. Past the constructor torch forbids to set them, for good reason: whoever
    read them before would not know. Nobody has read the copy's, and it takes over no iterator and no workers."""
    duplicate = copy.copy(loader)
    duplicate.__dict__.update(parts, _iterator=None, _IterableDataset_len_called=None)
    return duplicate


def _epochal(loader: Iterable[Any], source: Iterable[Any]) -> tuple[Epochal, ...]:
    """Who wants to be told the number of the epoch: what is iterated, or else the parts of the user's loader."""
    if isinstance(loader, Epochal):
        assert isinstance(source, Epochal)
        return (source,)
    if not isinstance(loader, DataLoader):
        return ()
    parts = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.dataset)
    return tuple({id(part): part for part in parts if isinstance(part, Epochal)}.values())


def _refuse(cut: Cut, items: Iterable[Any]) -> None:
    """Raise ValueError where so many items cannot be shared out."""
    length = length_of(items)
    sentence = None if length is None else cut.refuse(length)
    if sentence is not None:
        raise ValueError(sentence)


def _left_out(ranks: _Ranks) -> LeaveOut:
    """Say once that items were left out."""
    said: list[int] = []

    def leave_out(num_items: int) -> None:
        if not said:
            ranks.say(
                f"The last {num_items} batches of the epoch were too few to give each of the {ranks.share.count} "
                "ranks one, and were left out. Where ranks may have different numbers of batches, pass "
                "`use='validate'`, `'test'` or `'predict'`."
            )
        said.append(num_items)

    return leave_out
