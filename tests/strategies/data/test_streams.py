"""Iterable datasets, endless iterables and lists of batches: each item on one rank, boundaries kept."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from shares import in_order, read, share_out
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset[int]):
    """Counts to `size`; in workers, each takes every so-manieth."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id if info else 0, self.size, info.num_workers if info else 1))


class Shuffled(Stream):
    """Shuffles by the global streams."""

    def __iter__(self) -> Iterator[int]:
        items = list(super().__iter__())
        random.shuffle(items)
        while items:
            yield items.pop(int(torch.randint(len(items), ())))


class Shards(Stream):
    """Can read a part of itself."""

    def __init__(self, size: int, num_shards: int = 1, index: int = 0) -> None:
        super().__init__(size)
        self.num_shards, self.index, self.reads = num_shards, index, 0

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.size, num_shards, index)

    def __iter__(self) -> Iterator[int]:
        for item in range(self.index, self.size, self.num_shards):
            self.reads += 1
            yield item


class SizedShards(Shards):
    def shard(self, num_shards: int, index: int) -> SizedShards:
        return SizedShards(self.size, num_shards, index)

    def __len__(self) -> int:
        return len(range(self.index, self.size, self.num_shards))


def test_a_stream_is_split_at_the_batches_of_one_process_and_its_last_batch_is_made_even() -> None:
    for size in (24, 25, 27, 29):
        shares = read(share_out(lambda _, n=size: DataLoader(Stream(n), 4), 3))  # type: ignore[misc]
        assert in_order(shares) == list(range(size))
        assert shares[0][0] == [0, 1, 2, 3]
        assert shares[2][0] == [8, 9, 10, 11]
    assert in_order(read(share_out(lambda _: DataLoader(Stream(29), 4, drop_last=True), 3))) == list(range(24))


def test_a_stream_that_each_rank_reads_whole_is_reported() -> None:
    reported: list[str] = []
    share_out(lambda _: DataLoader(Stream(8), 2), 2, reported=reported)
    assert reported == [
        "`Stream` cannot be read in parts, so each of the 2 ranks reads all of it and keeps its share. Give it "
        "`shard(num_shards, index)`, which returns a part, to read each sample once."
    ]


class SplitsItself(Stream):
    """Reads each `count`-th sample from the `rank`-th on, as the environment says."""

    def __init__(self, size: int, rank: int, count: int) -> None:
        super().__init__(size)
        self.rank, self.count = rank, count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.size, self.count))


class InNests(SplitsItself):
    """The same, of tensors in nests."""

    def __iter__(self) -> Iterator[Any]:
        return ({"x": (torch.tensor([0.0, float(number)]), "text")} for number in super().__iter__())


def number_in(sample: Any) -> int:
    return sample if isinstance(sample, int) else int(sample["x"][0][1])


class Handle(Stream):
    """Reads what can be read once."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lines = (number for number in range(size))

    def __iter__(self) -> Iterator[int]:
        yield from self.lines


@pytest.mark.parametrize("kind", [SplitsItself, InNests])
def test_a_stream_that_splits_itself_is_not_split_again(kind: Any) -> None:
    reported: list[str] = []
    loaders = share_out(lambda rank: DataLoader(kind(64, rank, 2), 4, collate_fn=list), 2, reported=reported)
    numbers = [[number_in(sample) for batch in loader for sample in batch] for loader in loaders]
    assert numbers == [[*range(0, 64, 2)], [*range(1, 64, 2)]]
    assert reported == [
        f"The first samples of the ranks' `{kind.__name__}` differ, so it is taken as split over the ranks, and each "
        "rank reads all of its own. If it is one stream, which the ranks are to split, seed alike what it shuffles by."
    ]


def test_no_sample_is_lost_by_looking_at_the_first() -> None:
    assert in_order(read(share_out(lambda _: DataLoader(Handle(12), 2), 2))) == list(range(12))
    stream = Counted(12)
    assert in_order(read(share_out(lambda _: DataLoader(stream, 2), 2))) == list(range(12))


class Counted(Stream):
    """Goes on where it was left."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        assert self.begun <= 2, "once on each rank"
        return super().__iter__()


@pytest.fixture(scope="module")
def tracker() -> None:
    """The process that Python starts with the first spawn and keeps until it ends itself: here, before the test."""
    resource_tracker.ensure_running()
    while not Path(f"/proc/{resource_tracker._resource_tracker._pid}/cmdline").read_bytes():  # type: ignore[attr-defined]
        os.sched_yield()


@pytest.mark.slow
@pytest.mark.usefixtures("tracker")
@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_workers_split_a_shuffled_stream_in_the_same_way_on_all_ranks(method: str, persistent: bool) -> None:
    def make(rank: int) -> DataLoader[int]:
        return DataLoader(Shuffled(41), 3, num_workers=2, persistent_workers=persistent, multiprocessing_context=method)

    loaders = share_out(make, 2)
    next(iter(loaders[1]))
    epochs = [in_order(read(loaders)) for _ in range(2)]
    assert all(sorted(epoch) == list(range(41)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    for loader in loaders:
        loader.set_epoch(0)
    assert in_order(read(loaders)) == epochs[0]


def test_a_shuffled_stream_without_workers_is_one_stream_and_leaves_random_numbers_as_one_process_does() -> None:
    random.seed(5), torch.manual_seed(5)
    list(DataLoader(Shuffled(40), 8))
    expected = torch.get_rng_state(), random.getstate()
    random.seed(5), torch.manual_seed(5)
    loaders = share_out(lambda _: DataLoader(Shuffled(40), 4), 2)
    shares = [[batch.tolist() for batch in loaders[0]]]
    assert torch.equal(expected[0], torch.get_rng_state())
    assert expected[1] == random.getstate()
    random.seed(1), torch.manual_seed(1)
    shares += [[batch.tolist() for batch in loaders[1]]]
    assert sorted(in_order(shares)) == list(range(40))


def test_a_dataset_that_shards_itself_is_read_once() -> None:
    reported: list[str] = []
    dataset = Shards(8)
    loaders = share_out(lambda _: DataLoader(dataset, 2), 2, reported=reported)
    assert read(loaders) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert dataset.reads == 0
    assert reported == []


def test_shards_of_unequal_length_are_an_error_in_training() -> None:
    with pytest.raises(ValueError, match=r"`SizedShards\.shard` gives the 2 ranks 3, 2 batches, and each rank"):
        share_out(lambda _: DataLoader(SizedShards(9), 2), 2)
    assert [len(share) for share in read(share_out(lambda _: DataLoader(SizedShards(9), 2), 2, "test"))] == [3, 2]


def test_unbatched_items_are_dealt_out_and_an_uneven_rest_is_dropped_in_training_with_a_warning() -> None:
    loaders = share_out(lambda _: DataLoader(Stream(8), batch_size=None), 3)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match="The last 2 batches of the epoch were too few to give each of the 3 ranks"
        ):
            assert read(loaders) == [[0, 3], [1, 4], [2, 5]]
    uneven = share_out(lambda _: DataLoader(Stream(8), batch_size=None), 3, "test")
    assert read(uneven) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_list_of_batches_is_dealt_out_and_has_a_length() -> None:
    batches = [[0], [1], [2], [3], [4]]
    loaders = share_out(lambda _: batches, 2, "test")
    assert read(loaders) == [[[0], [2], [4]], [[1], [3]]]
    assert [len(loader) for loader in loaders] == [3, 2]
    with pytest.raises(ValueError, match="5 ready batches cannot be shared evenly by 2 ranks"):
        share_out(lambda _: batches, 2)
    with pytest.raises(ValueError, match=r"(?s)different loaders.*rank 0: length 2\n  rank 1: length 4"):
        share_out(lambda rank: list(range(2 + 2 * rank)), 2)


def test_an_infinite_iterable_is_split_and_not_read_beyond_the_step() -> None:
    reads = [0, 0]

    class Endless:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[int]:
            while True:
                yield reads[self.rank]
                reads[self.rank] += 1

    loaders = share_out(Endless, 2)
    iterators = [iter(loader) for loader in loaders]
    assert [[next(it) for _ in range(3)] for it in iterators] == [[0, 2, 4], [1, 3, 5]]
    assert reads == [5, 5]
    with pytest.raises(TypeError, match="has no len"):
        len(loaders[0])


def test_a_generator_is_exhausted_once_as_in_plain_python() -> None:
    loaders = share_out(lambda _: iter(range(4)), 2)
    assert read(loaders) == [[0, 2], [1, 3]]
    assert read(loaders) == [[], []]


def test_ranks_with_different_streams_raise() -> None:
    with pytest.raises(ValueError, match=r"(?s)batch size 2, num_workers 0\n  rank 1: batch size 3, num_workers 1"):
        share_out(lambda rank: DataLoader(Stream(8), 2 + rank, num_workers=rank), 2)


def test_a_data_pipe_is_refused() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    pipe: Any = IterableWrapper(range(8))
    with pytest.raises(ValueError, match="is a data pipe, which shards itself"):
        share_out(lambda _: DataLoader(pipe, 2), 2)


class Restarting(IterableDataset[int]):
    """Its iterator is the dataset, and begins again with each `iter`, as litdata's."""

    def __iter__(self) -> Iterator[int]:
        self.position = -1
        return self

    def __next__(self) -> int:
        self.position += 1
        if self.position >= 12:
            raise StopIteration
        return self.position


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "make", [lambda: DataLoader(Restarting(), 2), lambda: DataLoader(Restarting(), None), Restarting]
)
def test_a_stream_whose_iterator_begins_again_is_read_once(make: Callable[[], Any], count: int) -> None:
    loaders = share_out(lambda _: make(), count)
    for _ in range(2):
        batches = [torch.as_tensor(batch).reshape(-1).tolist() for loader in loaders for batch in loader]
        assert sorted(sample for batch in batches for sample in batch) == list(range(12))


def test_break_in_one_loader_changes_no_other() -> None:
    torch.manual_seed(3)
    left, kept = (share_out(lambda _: DataLoader(list(range(20)), 2, shuffle=True), 2) for _ in range(2))
    expected = read(kept)
    for loader in kept:
        loader.set_epoch(0)
    for loader in left:
        for _ in loader:
            break
    assert read(kept) == expected
