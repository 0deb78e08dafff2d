"""Datasets of Hugging Face: streams whose shards divide by the ranks or do not, and data that is split already."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import sklearn  # noqa: F401  # datasets imports it late, and it sets a variable of the environment
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from shares import share_out
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

SIZE = 26


def numbers(files: list[range]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from ({"x": number} for number in file)


def stream(num_shards: int) -> Any:
    """`SIZE` numbers in as many files."""
    ends = [SIZE * shard // num_shards for shard in range(num_shards + 1)]
    files = [range(*ends[shard : shard + 2]) for shard in range(num_shards)]
    return IterableDataset.from_generator(numbers, gen_kwargs={"files": files})


def table(size: int = SIZE) -> Any:
    return Dataset.from_dict({"x": list(range(size)), "weight": [0.5] * size})


def read(loaders: list[Any]) -> list[list[list[int]]]:
    """Each rank's batches of one epoch."""
    return [[torch.as_tensor(batch["x"]).reshape(-1).tolist() for batch in loader] for loader in loaders]


def flat(shares: list[list[list[int]]]) -> list[int]:
    return sorted(number for share in shares for batch in share for number in batch)


@pytest.mark.parametrize("formatted", [None, "torch"])
@pytest.mark.parametrize(("num_shards", "count"), [(1, 2), (3, 2), (2, 3), (5, 3), (1, 4)])
def test_shards_that_do_not_divide_by_the_ranks_are_read_once_in_equally_many_batches(
    num_shards: int, count: int, formatted: str | None
) -> None:
    reported: list[str] = []
    loaders = share_out(lambda _: DataLoader(stream(num_shards).with_format(formatted), 4), count, reported=reported)
    for _ in range(2):
        shares = read(loaders)
        assert flat(shares) == list(range(SIZE))
        assert len({len(share) for share in shares}) == 1
    assert reported == [
        f"`IterableDataset` has num_shards={num_shards}, which {count} ranks cannot share evenly, so each of them "
        f"reads all of it and keeps its share. Give it a multiple of {count} shards to read each sample once."
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("num_shards", "num_workers", "persistent"), [(1, 2, False), (3, 2, True), (3, 1, False)])
def test_each_shard_is_read_once_with_more_workers_than_shards(
    num_shards: int, num_workers: int, persistent: bool
) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent}
    loaders = share_out(lambda _: DataLoader(stream(num_shards), 4, **options), 2)
    for _ in range(2):
        shares = read(loaders)
        assert flat(shares) == list(range(SIZE))
        assert len({len(share) for share in shares}) == 1


def test_without_batching_samples_of_indivisible_shards_are_dealt_out() -> None:
    loaders = share_out(lambda _: DataLoader(stream(3), batch_size=None), 2)
    assert read(loaders) == [[[i] for i in range(0, SIZE, 2)], [[i] for i in range(1, SIZE, 2)]]


def test_shards_that_divide_by_the_ranks_are_each_read_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "datasets.distributed")  # `import datasets` does not import it
    loaders = share_out(lambda _: DataLoader(stream(2), 4), 2)
    shares = read(loaders)
    assert [flat([share]) for share in shares] == [list(range(13)), list(range(13, 26))]


@pytest.mark.parametrize("num_shards", [3, 4])
def test_set_epoch_on_the_dataset_or_the_loader_shuffles_again(num_shards: int) -> None:
    datasets = [stream(num_shards).shuffle(seed=1, buffer_size=8) for _ in range(2)]
    loaders = share_out(lambda rank: DataLoader(datasets[rank], 4), 2)
    first = read(loaders)
    for dataset in datasets:  # as its documentation says
        dataset.set_epoch(1)
    second = read(loaders)
    for loader in loaders:
        loader.set_epoch(2)
    third = read(loaders)
    assert flat(first) == flat(second) == flat(third) == list(range(SIZE))
    assert first != second != third != first
    for dataset in datasets:
        dataset.set_epoch(1)
    assert read(loaders) == second


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(("count", "num_workers"), [(1, 0), (1, 2), (2, 0), (3, 0)])
def test_a_stream_that_is_resumed_loses_no_sample_of_its_shuffle_buffer(
    kind: Any, count: int, num_workers: int
) -> None:
    def loaders() -> list[Any]:
        return share_out(lambda _: kind(stream(4).shuffle(seed=1, buffer_size=8), 2, num_workers=num_workers), count)

    whole = read(loaders())
    for loader, resumed, batches in zip(loaders(), loaders(), whole, strict=True):
        reading = iter(loader)
        head = [next(reading)["x"].tolist() for _ in range(3)]
        resumed.load_state_dict(loader.state_dict())
        assert head + read([resumed])[0] == batches
        assert read([resumed])[0] == batches


def test_a_stream_shuffled_without_a_seed_is_refused() -> None:
    for num_shards in (2, 3):
        with pytest.raises(ValueError, match=r"(?s)different loaders.*rank 0: dataset .*pass the same `seed`"):
            share_out(lambda _, n=num_shards: DataLoader(stream(n).shuffle(buffer_size=8), 4), 2)  # type: ignore[misc]
    assert flat(read(share_out(lambda _: DataLoader(stream(3).shuffle(buffer_size=8), 4), 1))) == list(range(SIZE))


@pytest.mark.parametrize("num_shards", [2, 3])
def test_a_stream_that_is_split_for_this_rank_is_not_split_again(num_shards: int) -> None:
    reported: list[str] = []
    loaders = share_out(
        lambda rank: DataLoader(split_dataset_by_node(stream(num_shards), rank, 2), 4), 2, reported=reported
    )
    assert flat(read(loaders)) == list(range(SIZE))
    assert reported == []


def test_a_stream_that_is_split_for_another_rank_or_world_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"`IterableDataset\(world_size=2, rank=1\)` reads another part .* which is 0 of 2",
    ):
        share_out(lambda rank: DataLoader(split_dataset_by_node(stream(4), 1 - rank, 2), 4), 2)
    with pytest.raises(ValueError, match=r"\(world_size=4, rank=0\)` reads another part .* which is 0 of 2"):
        share_out(lambda rank: DataLoader(split_dataset_by_node(stream(4), rank, 4), 4), 2)
    with pytest.raises(ValueError, match=r"\(world_size=2, rank=0\)` reads another part .* which is 0 of 1"):
        share_out(lambda _: DataLoader(split_dataset_by_node(stream(4), 0, 2), 4), 1)
    loaders = share_out(lambda _: DataLoader(split_dataset_by_node(stream(4), 0, 1), 4), 2)  # of one: not split
    assert flat(read(loaders)) == list(range(SIZE))


def test_streams_over_different_files_are_refused() -> None:
    def make(rank: int) -> DataLoader[Any]:
        files = [range(10), range(10, 20), range(20, 30), range(30, 40)][rank::2]
        return DataLoader(IterableDataset.from_generator(numbers, gen_kwargs={"files": files}), 4)

    with pytest.raises(ValueError, match=r"(?s)different loaders.*rank 0: dataset IterableDataset\(.*rank 1: dataset"):
        share_out(make, 2)


def test_a_table_that_is_already_split_is_refused_and_read_whole_on_request() -> None:
    def make(rank: int) -> DataLoader[Any]:
        return DataLoader(split_dataset_by_node(table(), rank, 2), 4)

    with pytest.raises(
        ValueError,
        match=r"(?s)rank 0: dataset Dataset\(13 rows, the first .*\n  rank 1: .*\nBuild the same loader on every rank, "
        r"over the whole dataset: .* If each rank reads .* split before, pass `use_distributed_sampler=False`\.",
    ):
        share_out(make, 2)
    assert flat(read(share_out(make, 2, distribute=False))) == list(range(SIZE))


def test_tables_that_each_rank_made_for_itself_are_the_same() -> None:
    def make(rank: int) -> DataLoader[Any]:
        dataset = table().map(lambda row: {"weight": row["weight"] + rank * 1e-9, "object": [row["x"]]})
        return DataLoader(dataset.shuffle(seed=3).with_format("torch"), 4, shuffle=True)

    assert flat(read(share_out(make, 2))) == list(range(SIZE))
