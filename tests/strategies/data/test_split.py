"""Data that is split over ranks already: recognised by what the field splits with, and not split again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchdata.nodes
from shares import read, share_out
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

SIZE = 24
Make = Callable[[int, int], Any]
"""Makes the loader of a rank in a world of a size."""


class Strided(Sampler[int]):
    """Every so-manieth index, as samplers of many projects: under the names of their attributes."""

    def __init__(self, **split: int) -> None:
        self.__dict__.update(split)
        self.split = tuple(split.values())

    def __iter__(self) -> Iterator[int]:
        count, index = self.split
        return iter(range(index, SIZE, count))

    def __len__(self) -> int:
        return SIZE // self.split[0]


class Batches(Strided):
    """Batches of two, for this rank."""

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        return iter([indices[start : start + 2] for start in range(0, len(indices), 2)])

    def __len__(self) -> int:
        return super().__len__() // 2


class StridedStream(IterableDataset[int]):
    """Knows its part by itself, as litdata's and mosaicml's do."""

    def __init__(self, place: str | None, **split: int) -> None:
        self.split = tuple(split.values())
        self.__dict__.update(split if place is None else {place: SimpleNamespace(**split)})

    def __iter__(self) -> Iterator[int]:
        count, index = self.split
        return iter(range(index, SIZE, count))


class Wrapped(IterableDataset[int]):
    """A stream around another one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


def over(sampler: Any) -> Any:
    """A pipeline of torchdata's nodes."""
    node = torchdata.nodes.SamplerWrapper(sampler)
    return torchdata.nodes.Loader(torchdata.nodes.Batcher(torchdata.nodes.Mapper(node, int), 2))


SPLIT: dict[str, Make] = {
    "DistributedSampler": lambda rank, size: DataLoader(
        range(SIZE), 2, sampler=DistributedSampler(range(SIZE), size, rank)
    ),
    "StatefulDistributedSampler": lambda rank, size: StatefulDataLoader(
        range(SIZE), 2, sampler=StatefulDistributedSampler(range(SIZE), size, rank)
    ),
    "within a batch sampler": lambda rank, size: DataLoader(
        range(SIZE), batch_sampler=BatchSampler(DistributedSampler(range(SIZE), size, rank), 2, False)
    ),
    "num_replicas": lambda rank, size: DataLoader(range(SIZE), 2, sampler=Strided(num_replicas=size, rank=rank)),
    "_world_size": lambda rank, size: DataLoader(range(SIZE), 2, sampler=Strided(_world_size=size, _rank=rank)),
    "a batch sampler": lambda rank, size: DataLoader(range(SIZE), batch_sampler=Batches(num_replicas=size, rank=rank)),
    "Megatron's": lambda rank, size: DataLoader(
        range(SIZE), batch_sampler=Batches(data_parallel_size=size, data_parallel_rank=rank)
    ),
    "accelerate's": lambda rank, size: DataLoader(
        range(SIZE), batch_sampler=Batches(num_processes=size, process_index=rank)
    ),
    "a stream": lambda rank, size: DataLoader(StridedStream(None, world_size=size, rank=rank), 2),
    "litdata's": lambda rank, size: DataLoader(StridedStream("distributed_env", world_size=size, global_rank=rank), 2),
    "mosaicml's": lambda rank, size: DataLoader(StridedStream("_parallel_rank_world", num_ranks=size, rank=rank), 2),
    "a stream within": lambda rank, size: DataLoader(Wrapped(StridedStream(None, num_replicas=size, rank=rank)), 2),
    "nodes": lambda rank, size: over(DistributedSampler(range(SIZE), size, rank)),
}

TORCHDATA_BEHIND = "ignore:'set_vital' is deprecated"  # torchdata 0.11 with torch 2.13


@pytest.mark.filterwarnings(TORCHDATA_BEHIND)
@pytest.mark.parametrize("make", SPLIT.values(), ids=list(SPLIT))
def test_what_is_split_for_this_rank_is_not_split_again(make: Make) -> None:
    shares = read(share_out(lambda rank: make(rank, 2), 2))
    assert sorted(sample for share in shares for batch in share for sample in batch) == list(range(SIZE))
    assert [len(share) for share in shares] == [6, 6]


@pytest.mark.filterwarnings(TORCHDATA_BEHIND)
@pytest.mark.parametrize("make", SPLIT.values(), ids=list(SPLIT))
def test_what_is_split_for_another_rank_or_world_is_refused(make: Make) -> None:
    advice = r"Leave it out: `setup_dataloaders` splits the data\. Or pass `use_distributed_sampler=False`"
    with pytest.raises(ValueError, match=rf"=2, \w+=1\)` reads another part .* which is 0 of 2\. {advice}"):
        share_out(lambda rank: make(1 - rank, 2), 2)
    with pytest.raises(ValueError, match=r"=3, \w+=0\)` reads another part than this rank, which is 0 of 2"):
        share_out(lambda rank: make(rank, 3), 2)
    assert share_out(lambda rank: make(1 - rank, 2), 2, distribute=False)


def test_a_split_over_one_is_none() -> None:
    shares = read(share_out(lambda _: DataLoader(range(SIZE), 2, sampler=DistributedSampler(range(SIZE), 1, 0)), 2))
    assert sorted(sample for share in shares for batch in share for sample in batch) == list(range(SIZE))


def test_a_map_style_dataset_that_knows_its_rank_is_shared() -> None:
    class Knows(list[int]):
        rank, world_size = 0, 2

    shares = read(share_out(lambda _: DataLoader(Knows(range(SIZE)), 2), 2))
    assert sorted(sample for share in shares for batch in share for sample in batch) == list(range(SIZE))


def test_parts_of_different_numbers_of_batches_are_an_error_in_training() -> None:
    def make(rank: int) -> DataLoader[int]:
        return DataLoader(range(SIZE), 5 + 2 * rank, sampler=Strided(num_replicas=2, rank=rank))

    with pytest.raises(ValueError, match=r"`Strided\(num_replicas=2, rank=\d\)` gives the 2 ranks 3, 2 batches, and"):
        share_out(make, 2)
    assert [len(loader) for loader in share_out(make, 2, "validate")] == [3, 2]


# Parts that say nothing of themselves: the ranks find that their data differs, where it is at hand.


class Opens(list[int]):
    """A user's own dataset: nothing of it is read before the first batch."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("read at set-up")


HALVES: dict[str, Callable[[int], Any]] = {
    "Subset": lambda rank: Subset(range(SIZE), range(rank, SIZE, 2)),  # type: ignore[arg-type]
    "Subset of a Subset": lambda rank: Subset(Subset(range(SIZE), range(rank, SIZE, 2)), range(6)),  # type: ignore[arg-type]
    "random_split": lambda rank: random_split(range(SIZE), [12, 12], torch.Generator().manual_seed(rank))[0],  # type: ignore[arg-type]
    "ConcatDataset": lambda rank: ConcatDataset([list(range(4)), list(range(rank, 8 + rank))]),  # type: ignore[list-item]
    "TensorDataset": lambda rank: TensorDataset(torch.randn(SIZE, generator=torch.Generator().manual_seed(0))[rank::2]),
    "list": lambda rank: list(range(rank, SIZE, 2)),
    "records": lambda rank: [{"text": f"{number}"} for number in range(rank, SIZE, 2)],
    "array": lambda rank: np.arange(rank, SIZE, 2),
    "tensor": lambda rank: torch.arange(rank, SIZE, 2),
}


@pytest.mark.parametrize("make", HALVES.values(), ids=list(HALVES))
def test_ranks_that_hold_different_parts_raise(make: Callable[[int], Any]) -> None:
    with pytest.raises(ValueError, match=r"(?s)different loaders.*rank 0: dataset (.*)\n  rank 1: dataset (?!\1\n)"):
        share_out(lambda rank: DataLoader(make(rank), 2), 2)
    assert share_out(lambda rank: DataLoader(make(0), 2), 2)
    assert share_out(lambda rank: DataLoader(make(rank), 2), 2, distribute=False)


def test_numbers_that_differ_by_rounding_are_the_same() -> None:
    weights = torch.randn(SIZE, 3)

    def make(rank: int) -> DataLoader[Any]:
        data = TensorDataset(weights + rank * 1e-7, (weights - weights) + rank * 1e-8)
        return DataLoader(data, 2)

    assert share_out(make, 2)


def test_objects_whose_repr_has_their_address_are_the_same() -> None:
    assert share_out(lambda _: DataLoader([object() for _ in range(SIZE)], 2), 2)  # type: ignore[arg-type]


def test_a_custom_dataset_is_not_read_at_set_up() -> None:
    assert share_out(lambda _: DataLoader(Subset(Opens(range(SIZE)), range(10)), 2), 2)  # type: ignore[arg-type]


def test_samplers_of_torch_are_compared_without_being_copied() -> None:
    class Uncopied(list[float]):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    def make(rank: int, weight: float = 1.0) -> DataLoader[int]:
        sampler = WeightedRandomSampler(Uncopied([1.0] * (SIZE - 1) + [weight]), SIZE)
        sampler.weights = Uncopied(sampler.weights.tolist())  # type: ignore[assignment]
        return DataLoader(range(SIZE), 2, sampler=sampler)  # type: ignore[arg-type]

    share_out(make, 2)
    with pytest.raises(ValueError, match="first indices"):
        share_out(lambda rank: make(rank, 1 + rank / 1e6), 2)
    with pytest.raises(ValueError, match="first indices"):
        share_out(lambda rank: DataLoader(range(9), 2, sampler=RandomSampler(range(9), rank == 1)), 2)  # type: ignore[arg-type]


def test_a_custom_sampler_is_compared_within_one_of_torch() -> None:
    def make(rank: int) -> DataLoader[int]:
        batches = BatchSampler(Strided(count=2, index=rank), 2, False)
        return DataLoader(range(SIZE), sampler=batches, batch_size=None)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"rank 0: first indices \[\[0, 2\], .*\n  rank 1: first indices \[\[1, 3\], "):
        share_out(make, 2)


def test_tensors_without_readable_values_are_compared_by_shape() -> None:
    sparse, meta = torch.eye(4).to_sparse(), torch.empty(4, 2, device="meta")
    assert share_out(lambda _: DataLoader(TensorDataset(sparse, meta), 2), 2)


# Random numbers


class Own(Sampler[int]):
    """Draws from everywhere, its own generators among them."""

    def __init__(self) -> None:
        self.generator, self.random, self.rng = torch.Generator(), random.Random(1), np.random.default_rng(2)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(torch.randperm(SIZE).numel(), generator=self.generator).tolist()
        random.shuffle(order)
        self.random.shuffle(order)
        np.random.shuffle(order)
        return iter(self.rng.permutation(order).tolist())

    def __len__(self) -> int:
        return SIZE


class Draws(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.rand(SIZE))


def states(loader: Any) -> Any:
    sampler = getattr(loader, "sampler", None)
    own = (sampler.generator, loader.generator) if isinstance(sampler, (Own, RandomSampler)) else ()
    more = (sampler.random.getstate(), sampler.rng.bit_generator.state) if isinstance(sampler, Own) else ()
    drawn = [each.get_state().tolist() for each in own if each is not None]
    return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(), drawn, more))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(range(SIZE), 2, shuffle=True),
    "generator": lambda: DataLoader(range(SIZE), 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "own": lambda: DataLoader(range(SIZE), 2, sampler=Own()),
    "stream": lambda: DataLoader(Draws(), 2),
    "workers": lambda: DataLoader(range(SIZE), 2, shuffle=True, num_workers=1),
    "list": lambda: list(range(SIZE)),
    "split": lambda: DataLoader(range(SIZE), 2, sampler=DistributedSampler(range(SIZE), 1, 0)),
    "stateful": lambda: StatefulDataLoader(range(SIZE), 2, shuffle=True),
}


@pytest.mark.filterwarnings(TORCHDATA_BEHIND)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("make", LOADERS.values(), ids=list(LOADERS))
def test_set_up_leaves_every_random_generator_as_it_was(make: Callable[[], Any], count: int) -> None:
    torch.manual_seed(1)
    loaders = [make() for _ in range(count)]
    before = [states(loader) for loader in loaders]
    share_out(loaders, count)
    assert [states(loader) for loader in loaders] == before


def test_a_generator_whose_state_differs_gets_that_of_rank_zero() -> None:
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    loaders = share_out(lambda rank: DataLoader(range(SIZE), 2, shuffle=True, generator=generators[rank]), 2)
    assert generators[1].get_state().tolist() == torch.Generator().manual_seed(0).get_state().tolist()
    shares = read(loaders)
    assert sorted(sample for share in shares for batch in share for sample in batch) == list(range(SIZE))
    assert generators[0].get_state().tolist() == generators[1].get_state().tolist()
