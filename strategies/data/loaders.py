"""`setup_dataloaders`: distribute a loader over ranks and move its batches; the user's loader is not modified.

A loader is never constructed again from guessed arguments. A shallow copy of the loader gets another sampler, or
another dataset if the dataset is iterable. Data that cannot be distributed raises here, before anything is read. Set-up
sends two or three small messages (`Ranks`); iterating sends none, except with `uneven`, and where rank 0 leads
(`rng.py`). Set-up draws from no random generator.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, SequentialSampler

from fabric.launchers.process.os_process import num_cores
from fabric.strategies.data import comparison, huggingface, sources
from fabric.strategies.data.context import ALONE, LoaderContext
from fabric.strategies.data.device_loader import DeviceLoader, Reading, SupportsSetEpoch, own_position
from fabric.strategies.data.epochs import Order
from fabric.strategies.data.joined import JoinedBatches, JoinedStream, of_all_shares
from fabric.strategies.data.partition import BatchCut, Cut, Joined, SampleCut, length_of
from fabric.strategies.data.presplit import parts_of, split_of
from fabric.strategies.data.rng import own_rngs, process_rngs, read_all, torch_rng, write_all
from fabric.strategies.data.token_batches import TokenStream
from fabric.strategies.data.transfer import one_ahead, one_by_one
from fabric.strategies.data.uneven import Agreement
from fabric.strategies.data.workers import WorkerStart, advice
from fabric.strategies.tensors.generator_interface import Rng


def process_dataloader(
    loader: Iterable[Any], context: LoaderContext, *, distribute: bool = True, move: bool = True
) -> DeviceLoader:
    """The loader, with this rank's share of the data (`distribute`) and its batches moved to the device (`move`).

    Ranks: all that read parts of the same data call it, with the same loader. A single rank reads as in plain PyTorch:
    the same order from the same random numbers. Data that is split for this rank already (`DistributedSampler`,
    `split_dataset_by_node`: see `presplit.py`) is not split again.
    Raises: ValueError: the data cannot be distributed, is split for another rank or another number of ranks, or ranks
    have different loaders. TypeError: `loader` is not iterable.
    """
    _refuse_what_is_no_loader(loader)
    if isinstance(loader, DataLoader) and move and context.device.type != "cpu":
        sentence = advice(loader, context.launcher, num_cores())
        if sentence is not None:
            context.report(sentence)
    reading = _reading(loader, context, distribute)
    if distribute and reading.agreement is None and context.evaluates_in_step and not _is_even(reading, context):
        reading = replace(reading, agreement=_agreement(loader, type(loader).__name__, context))
    carry = context.carry or (one_ahead if _is_read_ahead(loader) else one_by_one)
    reading = replace(reading, carry=carry, begin=(context.before_iterating, *reading.begin))
    device = context.device if move else torch.device("cpu")
    return DeviceLoader(loader, reading, replace(context, device=device, ranks=ALONE))


def _refuse_what_is_no_loader(loader: object) -> None:
    if isinstance(loader, DeviceLoader):
        raise ValueError("`setup_dataloaders` was given a loader that it returned before. Pass the original loader.")
    if isinstance(loader, Mapping) or (
        isinstance(loader, (list, tuple)) and isinstance(next(iter(loader), None), DataLoader)
    ):
        raise TypeError(
            f"`setup_dataloaders` was given a `{type(loader).__name__}` as one loader. Pass several one by one: "
            "`train, test = fabric.setup_dataloaders(train, test)`."
        )
    if not isinstance(loader, Iterable):
        raise TypeError(
            f"`setup_dataloaders` was given a `{type(loader).__name__}`, which cannot be iterated. Pass a `DataLoader`."
        )


def _reading(loader: Iterable[Any], context: LoaderContext, distribute: bool) -> Reading:
    """How the rank reads the loader."""
    joined = context.joined
    if not distribute:
        # Each rank reads its own loader, perhaps alone: no collective unless `uneven` was passed.
        agreement = None if context.uneven is None else _agreement(loader, type(loader).__name__, context)
        return replace(_own(loader, context), agreement=agreement)
    split = split_of(loader, context.share) if joined is None else None
    if split is not None:
        agreement = _equal_batches(loader, split, context, exact=_has_indices(loader))
        return replace(_own(loader, context), agreement=agreement)
    if joined is not None and not (isinstance(loader, DataLoader) and loader.batch_sampler is not None):
        return Reading(source=JoinedBatches(loader, joined.count), epochal=_epochal(loader, loader))
    if context.ranks.size == 1 and own_position(loader) is not None:
        return _whole(loader)
    if not isinstance(loader, DataLoader):
        if context.ranks.size > 1:
            described = {"loader": type(loader).__qualname__, "length": length_of(loader)}
            comparison.agree_on_loader(described, [], context.ranks)
        return _as_items(loader, context)
    if not isinstance(loader.dataset, IterableDataset):
        return _indexed(loader, context)
    if not isinstance(loader.dataset, IterDataPipe):
        return _shared_stream(loader, loader.dataset, context)
    if context.ranks.size == 1:
        return _own(loader, context)
    raise ValueError(
        f"`{type(loader.dataset).__name__}` is a data pipe, which shards itself in torch's `DataLoader`. Pass "
        "`use_distributed_sampler=False`, or make it an `IterableDataset`."
    )


def _is_even(reading: Reading, context: LoaderContext) -> bool:
    """Whether it is known that all ranks get the same number of batches: not so of streams, and parts of their own."""
    num_items = None if reading.index is None else length_of(reading.index.items)
    cut = reading.cut
    return num_items is not None and cut.share.count == context.share.count and cut.is_even(num_items)


def _has_indices(loader: object) -> bool:
    """Whether this is a loader over a map-style dataset."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _is_read_ahead(loader: object) -> bool:
    """Whether batches are read before the loop asks for them: those that workers load. Another iterable may depend on
    the loop, a stateful loader counts what was read, and without workers a batch is loaded with the loop's draws."""
    return isinstance(loader, DataLoader) and own_position(loader) is None and loader.num_workers > 0


def _own(loader: Iterable[Any], context: LoaderContext) -> Reading:
    """The user's loader unsplit: each rank reads all of it, at a position of its own."""
    if own_position(loader) is not None:
        reading = _whole(loader)
    elif isinstance(loader, DataLoader) and _has_indices(loader):
        reading = _indexed(loader, context.alone())
    else:
        whole = _whole(loader)
        items = _as_items(whole.source, context.alone())
        reading = replace(items, epochal=whole.epochal, announce=whole.announce)
    return replace(reading, part=context.part)


def _whole(loader: Iterable[Any]) -> Reading:
    """The user's loader; only its `worker_init_fn` is replaced."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return Reading(source=loader, epochal=_epochal(loader, loader), position=own_position(loader))
    source = _copy(loader)
    reading = Reading(source=source, epochal=_epochal(loader, source), position=own_position(source))
    return _reseeded(reading, source)


def _reseeded(reading: Reading, source: DataLoader[Any]) -> Reading:
    """The same, with a seed for each epoch if persistent workers read a stream."""
    dataset = source.dataset
    if not isinstance(dataset, IterableDataset) or isinstance(dataset, IterDataPipe):
        return reading
    if not source.persistent_workers or reading.position is not None:
        return reading
    stream = sources.PreparedStream(dataset, None, is_reseeded=True)
    source.__dict__["dataset"] = stream  # a copy, which has no workers yet
    return replace(reading, announce=stream.announce)


def _indexed(loader: DataLoader[Any], context: LoaderContext) -> Reading:
    """A loader over a map-style dataset."""
    _, items = sources.indices_of(loader)
    is_torchs_own = type(loader) is DataLoader and (type(items) in _WITHOUT_DRAWS or comparison.is_torchs(items))
    process = {"torch": torch_rng()} if is_torchs_own else process_rngs()
    order, seed, states = _order(process, loader, context, shuffles=not _draws_by_itself(items))
    is_seeded = loader.num_workers > 0
    name, index = sources.index_source(loader, context.first_share, not context.trains, order, is_seeded=is_seeded)
    index.joined = context.joined
    start = WorkerStart(loader)
    parts: dict[str, Any] = {"dataset": sources.SeededDataset(loader.dataset)} if is_seeded else {}
    if order.is_shared:
        described = {
            "dataset": comparison.describe_dataset(loader.dataset),
            "sampler": type(items).__qualname__,
            "length": length_of(items),
            "first indices": comparison.describe_order(items, loader.dataset, seed),
        }
        _agree(loader, described, order, states, context)
        _refuse(index.cut, items)
        parts["generator"] = torch.Generator()  # which draws what torch draws from it
    source = _copy(loader, worker_init_fn=start, **{name: index}, **parts)
    announce = start.announce if order.is_shared else None
    return Reading(source=source, order=order, index=index, announce=announce, epochal=_epochal(loader, source))


_WITHOUT_DRAWS = (SequentialSampler, range, list, tuple)


def _draws_by_itself(items: object) -> bool:
    """Whether a sampler draws from no generator of the process."""
    return type(items) in _WITHOUT_DRAWS or (
        comparison.is_torchs(items) and getattr(items, "generator", None) is not None
    )


def _order(
    process: Mapping[str, Rng], loader: Iterable[Any], context: LoaderContext, *, shuffles: bool
) -> tuple[Order, int, list[Any]]:
    """The order of a loader, the seed on which its ranks have agreed, and the states of rank 0's own generators."""
    own = own_rngs(loader) if isinstance(loader, DataLoader) else []
    keeps_workers = isinstance(loader, DataLoader) and loader.persistent_workers
    generator = loader.generator if isinstance(loader, DataLoader) else None
    ranks, shared = context.ranks, context.progress.rngs
    if ranks.size == 1:
        return Order(0, process, own, keeps_workers=keeps_workers), 0, []
    seed, states, of_own = ranks.broadcast((*shared.offer(process), read_all(own)))
    shared.agree(states)
    shared.num_loaders += 1

    def seed_workers(number: int) -> None:
        if number == 0 or not keeps_workers:
            torch.empty((), dtype=torch.int64).random_(generator=generator)

    order = Order(
        seed,
        {name: rng for name, rng in process.items() if name in states},
        own,
        shared=shared,
        lead=ranks.lead if shuffles and context.trains else None,
        is_alone=shuffles and not context.trains,
        seed_workers=seed_workers if _has_indices(loader) else None,
        keeps_workers=keeps_workers,
    )
    return order, seed, of_own


def _agree(
    loader: DataLoader[Any], described: dict[str, Any], order: Order, states: list[Any], context: LoaderContext
) -> None:
    """Raise ValueError if ranks have different loaders; give all of them the states of rank 0's own generators."""
    words = {"batch size": loader.batch_size, "drop_last": loader.drop_last, "generators": len(order.own)} | described
    if not comparison.agree_on_loader(words, order.own, context.ranks):
        context.report(
            "The random generators of this loader's sampler have different states on the ranks. All ranks read in the "
            "order of rank 0's. To choose the order yourself, seed them alike."
        )
        write_all(order.own, states)


def _shared_stream(loader: DataLoader[Any], dataset: IterableDataset[Any], context: LoaderContext) -> Reading:
    share, batch_size, joined, uneven = context.share, loader.batch_size, context.joined, not context.trains
    order, seed, states = _order(process_rngs(), loader, context, shuffles=True)
    if order.is_shared:
        described = {"dataset": comparison.describe_dataset(dataset), "length": length_of(dataset)}
        _agree(loader, described | {"num_workers": loader.num_workers}, order, states, context)
    if share.count > 1:
        part = sources.split_stream(dataset, share)
        if isinstance(part, sources.SplitStream):
            return _own_part(loader, part, context)
        if not huggingface.is_iterable(dataset):
            first = comparison.describe_first_sample(parts_of(loader), dataset, seed)
            if not context.ranks.same(first):
                name = type(dataset).__name__
                context.report(_SPLITS_ITSELF.format(name=name))
                return replace(_own(loader, context), agreement=_equal_batches(loader, name, context, exact=False))
        context.report(part)
    cut: Cut = SampleCut(share=context.first_share, uneven=uneven, batch_size=batch_size, drop_last=loader.drop_last)
    if batch_size is None and isinstance(dataset, TokenStream):
        cut = BatchCut(share=share, uneven=uneven)
    elif batch_size is not None and joined is not None:
        if isinstance(sources.split_stream(dataset, context.first_share), sources.SplitStream):
            return _joined_parts(loader, dataset, batch_size, joined)
        cut = of_all_shares(cut, joined)
    drawn_here = order if loader.num_workers == 0 else None
    stream = sources.PreparedStream(dataset, cut, order=drawn_here, is_reseeded=loader.persistent_workers)
    source = _copy(loader, dataset=stream, batch_sampler=None)
    return Reading(
        source=source, order=order, stream=stream, announce=stream.announce, epochal=_epochal(loader, source)
    )


def _joined_parts(loader: DataLoader[Any], dataset: IterableDataset[Any], batch_size: int, joined: Joined) -> Reading:
    split = [
        part for each in joined.shares() if isinstance(part := sources.split_stream(dataset, each), sources.SplitStream)
    ]
    stream = JoinedStream([part.part for part in split], batch_size, joined)
    source = _copy(loader, dataset=stream, batch_sampler=None)
    return Reading(source=source, epochal=_epochal(loader, loader), begin=tuple(part.set_epoch for part in split))


_SPLITS_ITSELF = (
    "The first samples of the ranks' `{name}` differ, so it is taken as split over the ranks, and each rank reads all "
    "of its own. If it is one stream, which the ranks are to split, seed alike what it shuffles by."
)


def _own_part(loader: DataLoader[Any], stream: sources.SplitStream, context: LoaderContext) -> Reading:
    source = _copy(loader, dataset=stream.part)
    agreement = _equal_batches(source, stream.words, context, exact=False)
    epochal = tuple({id(each): each for each in (*_epochal(loader, loader), *_epochal(source, source))}.values())
    position = own_position(source)
    reading = _as_items(source, context.alone()) if position is None else Reading(source=source, position=position)
    begin = (*reading.begin, stream.set_epoch)
    reading = replace(reading, epochal=epochal, begin=begin, part=context.part, agreement=agreement)
    return _reseeded(reading, source)


def _equal_batches(loader: Iterable[Any], words: str, context: LoaderContext, *, exact: bool) -> Agreement | None:
    """Gives ranks that train on parts of their own equal numbers of batches; None if that is not needed.

    Ranks: all call it. `exact`: the loader's length comes from its sampler; an iterable dataset only claims one.
    Raises: ValueError: the lengths are known, and differ.
    """
    if not context.trains and not context.evaluates_in_step:
        return None
    if not context.trains or context.uneven is not None:
        return _agreement(loader, words, context)
    length = length_of(loader)
    if context.ranks.same(repr(length)):
        return None if exact else _agreement(loader, words, context)
    lengths = context.ranks.gather(length)
    raise ValueError(
        f"`{words}` gives the {len(lengths)} ranks {', '.join(map(str, lengths))} batches, and each rank must train on "
        'as many as any other. Pass `drop_last=True`, make the parts equal, pass `uneven="stop"` or `uneven="repeat"`, '
        "or, where ranks may have different numbers of batches, `use='validate'`, `'test'` or `'predict'`."
    )


def _agreement(loader: Iterable[Any], words: str, context: LoaderContext) -> Agreement | None:
    if context.ranks.size == 1 or context.ranks.votes is None:
        return None
    votes, ahead = context.ranks.votes(), _is_read_ahead(loader)
    return Agreement(context.uneven or "stop", votes, words, context.report, ahead=ahead, trains=context.trains)


def _as_items(items: Iterable[Any], context: LoaderContext) -> Reading:
    """An iterable of batches, distributed round-robin."""
    cut = SampleCut(share=context.share, uneven=not context.trains)
    _refuse(cut, items)
    order, _, _ = _order(process_rngs(), items, context, shuffles=not _draws_by_itself(items))
    # Only a list is read ahead: any other iterable may have a state, which follows the loop.
    most_steps = sources.MOST_STEPS if isinstance(items, (list, tuple)) else 1
    position = own_position(items)
    index = sources.IndexSource(
        items, items, cut, order, most_steps=most_steps, eager=True, resumes=position is not None
    )
    return Reading(source=index, order=order, index=index, position=position, epochal=_epochal(items, items))


def _copy(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """A shallow copy of the user's loader with other attributes, without its iterator and workers; its workers start
    as `WorkerStart` says.

    `DataLoader` forbids to set these attributes after construction, since an iterator may have read them; the copy has
    no iterator.
    """
    duplicate = copy.copy(loader)
    replaced = {"worker_init_fn": WorkerStart(loader), "_iterator": None, "_IterableDataset_len_called": None}
    duplicate.__dict__.update(replaced | parts)
    return duplicate


def _epochal(loader: Iterable[Any], source: Iterable[Any]) -> tuple[SupportsSetEpoch, ...]:
    """The objects whose `set_epoch` is called: the iterated loader, or else the parts of the user's loader."""
    if isinstance(loader, SupportsSetEpoch):
        assert isinstance(source, SupportsSetEpoch)
        return (source,)
    if not isinstance(loader, DataLoader):
        return ()
    parts = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.dataset)
    return tuple({id(part): part for part in parts if isinstance(part, SupportsSetEpoch)}.values())


def _refuse(cut: Cut, items: Iterable[Any]) -> None:
    """Raise ValueError if so many items cannot be distributed over the ranks."""
    length = length_of(items)
    sentence = None if length is None else cut.refuse(length)
    if sentence is not None:
        raise ValueError(sentence)
