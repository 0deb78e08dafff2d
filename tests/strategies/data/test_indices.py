"""Map-style loaders: every sample on one rank, the same number of batches, the order of one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from shares import in_order, read, share_out
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric.strategies.data.loop_progress import LoopProgress
from fabric.strategies.data.partition import Share

TORCHDATA_BEHIND = "ignore:'set_vital' is deprecated"  # torchdata 0.11 with torch 2.13


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index


class GlobalShuffle(Sampler[int]):
    """Draws from torch, `random` and numpy, as samplers found in the wild do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size).tolist()
        random.shuffle(order)
        yield from np.random.permutation(order).tolist()

    def __len__(self) -> int:
        return self.size


class Endless(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(self.size, ()))


class Named(DataLoader[int]):
    """A loader whose constructor nobody could guess."""

    def __init__(self, name: str, *, size: int) -> None:
        super().__init__(Numbers(size), batch_size=4, shuffle=True)
        self.name = name


def test_each_sample_is_read_once_in_the_order_of_one_process_for_any_sizes() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        count, batch_size, size = chance.randint(1, 5), chance.randint(2, 5), chance.randint(5, 60)
        drop_last = chance.random() < 0.3 and size >= count * batch_size
        plain = DataLoader(Numbers(size), batch_size, drop_last=drop_last)
        loaders = share_out([plain] * count, count)
        shares = read(loaders)
        case = f"{count=} {batch_size=} {size=} {drop_last=}: {shares}"
        assert [len(loader) for loader in loaders] == [len(share) for share in shares], case
        step = batch_size * count
        assert in_order(shares) == list(range(size // step * step if drop_last else size)), case
        assert all(1 <= len(batch) <= batch_size for share in shares for batch in share), case
        for batches in zip(*shares, strict=True):
            assert max(map(len, batches)) - min(map(len, batches)) <= 1, case
        alone = list(DataLoader(Numbers(size), step, drop_last=drop_last))
        whole = [[s for batch in batches for s in batch] for batches in zip(*shares, strict=True)]
        if size % step == 0 or size % step >= count:
            assert whole == [batch.tolist() for batch in alone], case
        else:
            assert whole[:-2] == [batch.tolist() for batch in alone[:-2]], case


@pytest.mark.slow
def test_workers_change_nothing_about_who_reads_what() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(3):
        count, batch_size, size, workers = (chance.randint(*ends) for ends in ((2, 4), (2, 5), (8, 60), (1, 2)))
        persistent, prefetch = chance.random() < 0.5, chance.randint(1, 4)

        def loader(batch_size: int, num_workers: int, size: int = size, persistent: bool = persistent) -> Any:
            generator = torch.Generator().manual_seed(4)
            options = {"prefetch_factor": prefetch, "persistent_workers": persistent} if num_workers else {}  # noqa: B023
            return DataLoader(
                Numbers(size), batch_size, shuffle=True, num_workers=num_workers, generator=generator, **options
            )

        case = f"{count=} {batch_size=} {size=} {workers=} {persistent=} {prefetch=}"
        loaders = share_out([loader(batch_size, workers) for _ in range(count)], count)
        plain = loader(batch_size * count, workers)
        for epoch in range(2):
            expected = [sample for batch in plain for sample in batch.tolist()]
            assert in_order(read(loaders)) == expected, f"epoch {epoch} of {case}"


def test_ranks_that_hold_one_model_together_read_the_same() -> None:
    loaders = share_out(
        lambda rank: DataLoader(Numbers(20), 2, shuffle=True),
        4,
        shares=[Share(index=rank // 2, count=2) for rank in range(4)],
    )
    for loader in loaders:
        torch.manual_seed(random.randrange(2**31))  # no matter what a rank's own random numbers are
        loader.set_epoch(0)
    shares = read(loaders)
    assert shares[0] == shares[1]
    assert shares[2] == shares[3]
    assert sorted(in_order(shares[::2])) == list(range(20))


@pytest.mark.parametrize("count", [2, 3])
def test_too_few_samples_for_a_step_are_filled_up_from_the_step_before(count: int) -> None:
    shares = read(share_out(lambda _: DataLoader(Numbers(4 * count + 1), 4), count))
    assert [len(batch) for share in shares for batch in share[1:]] == [1] * count
    assert in_order(shares) == list(range(4 * count + 1))


def test_one_process_reads_by_a_generator_as_plain_pytorch() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(20), 3, shuffle=True, generator=torch.Generator().manual_seed(5))

    plain = make()
    (ours,) = share_out(lambda _: make(), 1)
    assert [read([ours])[0] for _ in range(3)] == [[batch.tolist() for batch in plain] for _ in range(3)]


@pytest.mark.parametrize("sampler", [None, GlobalShuffle(24)])
def test_one_seed_gives_one_global_batch_whatever_the_number_of_ranks(sampler: Any) -> None:
    orders = []
    for count in (1, 2, 4):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        loaders = share_out(
            lambda _, n=count: DataLoader(Numbers(24), 8 // n, shuffle=sampler is None, sampler=sampler),  # type: ignore[misc]
            count,
        )
        orders.append([in_order(read(loaders)) for _ in range(2)])
    assert orders[0][0] != orders[0][1]
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_that_draws_from_global_streams_has_one_order_on_all_ranks_and_leaves_them_as_one_process_does(
    in_batches: bool,
) -> None:
    def make(rank: int) -> DataLoader[int]:
        if not in_batches:
            return DataLoader(Numbers(100), 5, sampler=GlobalShuffle(100))
        # In torch's own class, an iterable that is no `Sampler`.
        shuffle = type(
            "Shuffle", (), {"__iter__": GlobalShuffle.__iter__, "__len__": GlobalShuffle.__len__, "size": 100}
        )
        return DataLoader(Numbers(100), batch_sampler=BatchSampler(shuffle(), 5, drop_last=False))

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    list(make(0))
    expected = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    loaders = share_out(make, 2)
    first = [[batch.tolist() for batch in loaders[0]]]
    assert torch.equal(expected[0], torch.get_rng_state())
    assert expected[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    first += [[batch.tolist() for batch in loaders[1]]]
    assert sorted(in_order(first)) == list(range(100))
    second = read(loaders)
    assert sorted(in_order(second)) == list(range(100))
    assert second != first


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_size_that_is_changed_between_epochs_is_followed(count: int, drop_last: bool) -> None:
    plain = DataLoader(Numbers(26), 4 * count, drop_last=drop_last)
    loaders = share_out(lambda _: DataLoader(Numbers(26), 4, drop_last=drop_last), count)
    for size in (4, 2, 6):
        for loader, number in [(plain, count), *((each, 1) for each in loaders)]:
            loader.batch_sampler.batch_size = size * number
        shares = read(loaders)
        assert [len(share) for share in shares] == [len(plain)] * count == [len(loader) for loader in loaders]
        if count == 1 or drop_last:
            assert [in_order([[each] for each in step]) for step in zip(*shares, strict=True)] == [
                batch.tolist() for batch in plain
            ]
        else:
            assert in_order(shares) == list(range(26))


def test_seeding_torch_governs_the_order() -> None:
    def shuffled(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return in_order(read(share_out(lambda _: DataLoader(Numbers(64), 4, shuffle=True), 2)))

    assert shuffled(1) == shuffled(1) != shuffled(2)


def test_loaders_that_are_set_up_in_the_same_random_state_are_shuffled_differently_and_again_alike() -> None:
    numbers = [LoopProgress() for _ in range(2)]

    def shuffled() -> list[list[int]]:
        torch.manual_seed(1)
        both = [share_out(lambda _: DataLoader(Numbers(64), 4, shuffle=True), 2, numbers=numbers) for _ in range(2)]
        return [in_order(read(loaders)) for loaders in both]

    first, second = shuffled()
    assert first != second
    assert [first, second] == shuffled()


@pytest.mark.filterwarnings(TORCHDATA_BEHIND)
@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
def test_a_generator_gives_all_ranks_the_order_of_plain_pytorch_epoch_by_epoch(loader_class: Any) -> None:
    def make(batch_size: int) -> DataLoader[int]:
        generator = torch.Generator().manual_seed(7)
        return loader_class(Numbers(48), batch_size, shuffle=True, generator=generator)

    plain = make(8)
    loaders = share_out(lambda _: make(4), 2)
    for epoch in range(3):
        next(iter(loaders[1]))  # a peek on one rank
        expected = [sample for batch in plain for sample in batch.tolist()]
        assert in_order(read(loaders)) == expected, f"epoch {epoch}"


def test_generators_that_differ_get_the_state_of_rank_zero_with_a_warning() -> None:
    reported: list[str] = []

    def make(rank: int) -> DataLoader[int]:
        return DataLoader(Numbers(20), 2, shuffle=True, generator=torch.Generator().manual_seed(rank))

    loaders = share_out(make, 2, reported=reported)
    assert sorted(in_order(read(loaders))) == list(range(20))
    assert len(reported) == 1
    assert "generators of this loader's sampler have different states on the ranks" in reported[0]


def test_a_generator_that_is_seeded_again_starts_again() -> None:
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    loaders = share_out(lambda rank: DataLoader(Numbers(48), 4, shuffle=True, generator=generators[rank]), 2)
    orders = []
    for _ in range(2):
        for generator in generators:
            generator.manual_seed(3)
        orders.append(in_order(read(loaders)))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("generated", [True, False])
def test_leaving_early_at_different_batches_keeps_the_ranks_together(generated: bool) -> None:
    def make(rank: int) -> DataLoader[int]:
        return DataLoader(
            Numbers(400), 2, sampler=RandomSampler(range(400), replacement=True, generator=torch.Generator())
        ) if generated else DataLoader(Numbers(400), 2, shuffle=True)  # fmt: skip

    loaders = share_out(make, 2)
    for loader, stop in zip(loaders, (2, 90), strict=True):
        for step, _ in enumerate(loader):
            if step == stop:
                break
    shares, again = read(loaders), read(share_out(make, 2))
    assert in_order(shares) != in_order(again)
    if not generated:
        assert sorted(in_order(shares)) == list(range(400))
    assert [len(share) for share in shares] == [100, 100]


def test_an_iterator_left_early_can_be_continued() -> None:
    generator = torch.Generator().manual_seed(1)
    loaders = share_out(lambda _: DataLoader(Numbers(40), 2, shuffle=True, generator=copy.deepcopy(generator)), 2)
    iterators = [iter(loader) for loader in loaders]
    firsts = [[next(it).tolist() for _ in range(3)] for it in iterators]
    for loader in loaders:
        assert len(list(loader)) == 10
    rests = [first + [batch.tolist() for batch in it] for first, it in zip(firsts, iterators, strict=True)]
    assert sorted(in_order(rests)) == list(range(40))


def test_a_peek_does_not_count_as_an_epoch_and_a_second_batch_does() -> None:
    torch.manual_seed(0)
    loaders = share_out(lambda _: DataLoader(Numbers(40), 2, shuffle=True), 2)
    state = torch.get_rng_state()
    peeked = next(iter(loaders[0])).tolist()
    assert torch.equal(torch.get_rng_state(), state)
    first = read(loaders)
    assert first[0][0] == peeked
    for loader in loaders:
        batches = iter(loader)
        next(batches), next(batches)
    third = read(loaders)
    chosen = []
    for _ in range(2):
        for loader in loaders:
            loader.set_epoch(1)
        chosen.append([read(loaders), read(loaders)])
    assert chosen[0] == chosen[1]
    assert len({str(order) for order in (first, third, *chosen[0])}) == 4


def test_set_epoch_sets_the_order_and_reaches_a_custom_sampler() -> None:
    class Told(GlobalShuffle):
        epochs: tuple[int, ...] = ()

        def set_epoch(self, epoch: int) -> None:
            self.epochs += (epoch,)

    sampler = Told(30)
    (loader, _) = share_out(lambda _: DataLoader(Numbers(30), 3, sampler=sampler), 2)
    orders = []
    for epoch in (5, 0, 5):
        loader.set_epoch(epoch)
        orders.append(read([loader]))
    assert orders[0] == orders[2] != orders[1]
    assert sampler.epochs == (5, 0, 5)


def test_set_epoch_reaches_a_loader_that_has_it_and_not_the_original() -> None:
    class Told(DataLoader[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            epochs.append(self.epoch)
            return super().__iter__()

    epochs: list[int] = []
    original = Told(Numbers(8), 2)
    for loader in share_out([original, original], 2):
        loader.set_epoch(3)
        list(loader)
    assert epochs == [3, 3]
    assert original.epoch == -1


def test_set_epoch_of_an_iterable_is_called() -> None:
    class Told(list[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    for count in (1, 2):
        items = Told(range(4))
        share_out([items] * count, count)[0].set_epoch(2)
        assert items.epoch == 2


def test_an_infinite_sampler_is_split_and_has_no_length() -> None:
    loaders = share_out(lambda _: DataLoader(Numbers(1000), 2, sampler=Endless(1000)), 2)
    with pytest.raises(TypeError, match="has no len"):
        len(loaders[0])
    iterators = [iter(loader) for loader in loaders]
    steps = [[next(it).tolist() for _ in range(300)] for it in iterators]
    assert steps[0] != steps[1]
    for loader in loaders:
        next(iter(loader))
    again = [next(iter(loader)).tolist() for loader in loaders]
    assert again != [steps[0][0], steps[1][0]]


def test_batches_of_a_custom_batch_sampler_are_dealt_out_and_the_last_are_split() -> None:
    batches = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9], [10, 11, 12, 13, 14]]
    loaders = share_out(lambda _: DataLoader(Numbers(15), batch_sampler=batches), 3)
    assert read(loaders) == [[[0, 1, 2], [9]], [[3, 4], [10, 11, 12]], [[5, 6, 7, 8], [13, 14]]]
    assert [len(loader) for loader in loaders] == [2, 2, 2]


def test_a_last_batch_too_small_to_split_is_filled_up_from_the_batches_before() -> None:
    shares = read(share_out(lambda _: DataLoader(Numbers(9), batch_sampler=[[0, 1], [2, 3, 4], [5, 6, 7], [8]]), 3))
    assert sorted(in_order(shares)) == list(range(9))
    assert [len(share) for share in shares] == [2, 2, 2]


def test_custom_batches_are_split_with_every_sample_once_for_any_sizes() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        count, num_batches = chance.randint(2, 4), chance.randint(4, 12)
        sizes = [chance.randint(2, 6) for _ in range(num_batches)]
        ends = np.cumsum(sizes).tolist()
        batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
        loaders = share_out([DataLoader(Numbers(ends[-1]), batch_sampler=batches)] * count, count)
        shares = read(loaders)
        assert sorted(in_order(shares)) == list(range(ends[-1])), f"{count=} {sizes=}: {shares}"
        assert {len(share) for share in shares} == {len(loader) for loader in loaders}


def test_a_last_round_that_cannot_be_split_is_an_error_in_training_and_uneven_elsewhere() -> None:
    def make(rank: int) -> DataLoader[int]:
        return DataLoader(Numbers(5), batch_sampler=[[0], [1], [2], [3], [4]])

    with pytest.raises(ValueError, match="ended with 1 batches of one sample for 2 ranks, and the batches before have"):
        read(share_out(make, 2))
    assert read(share_out(make, 2, "test")) == [[[0], [2], [4]], [[1], [3]]]


def test_an_explicit_batch_sampler_of_torch_is_cut_sample_by_sample() -> None:
    batches = BatchSampler(SequentialSampler(range(11)), 3, False)
    assert in_order(read(share_out(lambda _: DataLoader(Numbers(11), batch_sampler=batches), 2))) == list(range(11))


def test_without_batching_items_are_dealt_out_and_an_uneven_number_is_an_error_only_in_training() -> None:
    assert read(share_out(lambda _: DataLoader(Numbers(6), batch_size=None), 3)) == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(ValueError, match=r"7 ready batches cannot be shared evenly by 3 ranks.*Pass 6 or 9 batches"):
        share_out(lambda _: DataLoader(Numbers(7), batch_size=None), 3)
    loaders = share_out(lambda _: DataLoader(Numbers(7), batch_size=None), 3, "predict")
    assert read(loaders) == [[0, 3, 6], [1, 4], [2, 5]]
    assert [len(loader) for loader in loaders] == [3, 2, 2]


def test_an_uneven_number_of_batches_of_one_is_an_error_in_training_and_uneven_elsewhere() -> None:
    with pytest.raises(ValueError, match="`batch_size=1` over 7 samples on 2 ranks leaves 1 samples"):
        share_out(lambda _: DataLoader(Numbers(7)), 2)
    loaders = share_out(lambda _: DataLoader(Numbers(7)), 2, "validate")
    assert read(loaders) == [[[0], [2], [4], [6]], [[1], [3], [5]]]
    assert [len(loader) for loader in loaders] == [4, 3]
    assert read(share_out(lambda _: DataLoader(Numbers(7), drop_last=True), 2)) == [[[0], [2], [4]], [[1], [3], [5]]]


@pytest.mark.parametrize("use", ["validate", "test", "predict"])
def test_an_evaluation_may_have_fewer_samples_than_ranks(use: Any) -> None:
    loaders = share_out(lambda _: DataLoader(Numbers(2), 4), 3, use)
    assert read(loaders) == [[[0]], [[1]], []]
    assert [len(loader) for loader in loaders] == [1, 1, 0]
    assert read(share_out(lambda _: DataLoader(Numbers(1), batch_sampler=[[0]]), 2, use)) == [[[0]], []]


def test_too_few_samples_are_an_error_at_set_up() -> None:
    with pytest.raises(ValueError, match="3 samples leave no batch for each of the 4 ranks"):
        share_out(lambda _: DataLoader(Numbers(3), 2), 4)
    for use in ("train", "validate"):
        with pytest.raises(ValueError, match="0 samples leave no batch for each of the 2 ranks"):
            share_out(lambda _: DataLoader(Numbers(0), 2), 2, use)
    with pytest.raises(
        ValueError, match=r"7 samples leave no batch .* 8 samples a step \(`batch_size=4, drop_last=True`\)"
    ):
        share_out(lambda _: DataLoader(Numbers(7), 4, drop_last=True), 2)
    with pytest.raises(ValueError, match="yields no batch"):
        share_out(lambda _: DataLoader(Numbers(3), batch_sampler=[]), 2)


def test_ranks_given_different_loaders_raise_with_what_each_was_given() -> None:
    with pytest.raises(ValueError, match=r"(?s)different loaders.*rank 0: length 10.*rank 1: length 12"):
        share_out(lambda rank: DataLoader(Numbers(10 + 2 * rank), 2), 2)
    with pytest.raises(ValueError, match=r"(?s)rank 0: batch size 2\n  rank 1: batch size 3"):
        share_out(lambda rank: DataLoader(Numbers(12), 2 + rank), 2)
    orders = [[0, 1, 2, 3], [3, 2, 1, 0]]
    with pytest.raises(ValueError, match=r"(?s)rank 0: first indices \[0, 1, 2, 3\].*rank 1: first indices \[3, 2"):
        share_out(lambda rank: DataLoader(Numbers(4), 2, sampler=orders[rank]), 2)
    with pytest.raises(ValueError, match=r"(?s)rank 0: sampler RandomSampler.*rank 1: sampler SequentialSampler"):
        share_out(lambda rank: DataLoader(Numbers(4), 2, shuffle=rank == 0), 2)


class Custom(Dataset[Any]):
    """Keeps its samples in an attribute."""

    def __init__(self, held: Any, *more: Any) -> None:
        self.samples, self.more = held, more

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was loaded")


def shuffled(rank: int) -> list[int]:
    return np.random.default_rng(rank).permutation(200).tolist()


HELD: dict[str, Callable[[list[int]], Any]] = {
    "a list": lambda order: Custom([(f"folder/{number}.png", number % 10) for number in order]),
    "a tuple of strings": lambda order: Custom(tuple(f"{number}" for number in order)),
    "an array": lambda order: Custom(np.array(order)),
    "a tensor": lambda order: Custom(torch.arange(600).reshape(200, 3)[order]),
    "a table": lambda order: Custom(pandas.DataFrame({"name": [f"{number}" for number in order]})),
    "a subset of it": lambda order: Subset(Custom(order), range(100)),
    "a dataset within it": lambda order: Custom(Custom(order)),
}


@pytest.mark.parametrize("name", HELD)
def test_custom_datasets_that_hold_their_samples_in_another_order_on_each_rank_raise(name: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)different loaders.*rank 0: dataset (.*)\n  rank 1: dataset (?!\1\n)"):
        share_out(lambda rank: DataLoader(HELD[name](shuffled(rank)), 2), 2)
    share_out(lambda rank: DataLoader(HELD[name](shuffled(7)), 2), 2)


def test_what_is_no_data_of_a_custom_dataset_may_differ_by_rank_and_everything_may_be_held() -> None:
    class Own(list[int]):
        def __len__(self) -> int:
            raise AssertionError("code of the user was run")

    def make(rank: int) -> Any:
        dataset = Custom(range(4), torch.eye(3).to_sparse(), torch.ones(3, device="meta"), np.array(3))
        dataset.own = Own([rank])  # type: ignore[attr-defined]
        dataset.itself = Subset(dataset, [0])  # type: ignore[attr-defined]
        dataset.rank, dataset.cache, dataset.generator = rank, {rank: rank}, random.Random(rank)  # type: ignore[attr-defined]
        dataset.large = torch.zeros(1).expand(2**40)  # type: ignore[attr-defined]
        return DataLoader(dataset, 2)

    share_out(make, 2)


def test_a_distributed_sampler_is_left_as_it_is_and_a_wrong_one_is_an_error() -> None:
    def make(rank: int) -> DataLoader[int]:
        return DataLoader(Numbers(10), 2, sampler=DistributedSampler(range(10), 2, rank, shuffle=False))

    assert read(share_out(make, 2)) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]
    with pytest.raises(
        ValueError, match=r"DistributedSampler\(num_replicas=2, rank=0\)` reads another part than .* 0 of"
    ):
        share_out(make, 1)


def test_the_original_loader_is_unchanged_and_any_subclass_is_accepted() -> None:
    originals = [Named("mine", size=20) for _ in range(2)]
    before = [dict(vars(original)) for original in originals]
    loaders = share_out(lambda rank: originals[rank], 2)
    assert sorted(in_order(read(loaders))) == list(range(20))
    assert [vars(original) for original in originals] == before
    assert loaders[0].name == "mine"
    assert loaders[0].dataset is originals[0].dataset
    assert loaders[0].batch_size == 4
    with pytest.raises(AttributeError, match="nothing"):
        _ = loaders[0].nothing


def test_a_loader_that_does_not_read_its_sampler_is_an_error() -> None:
    class Deaf(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter([torch.tensor([1])])

    loaders = share_out(lambda _: Deaf(Numbers(8), 2), 2)
    with pytest.raises(TypeError, match="`Deaf` yields batches without reading its sampler"):
        list(loaders[0])


def test_a_subclass_that_starts_at_a_later_batch_is_split_and_counted() -> None:
    class Late(DataLoader[int]):
        def __iter__(self) -> Any:
            yield from super().__iter__()

    loaders = share_out(lambda _: Late(Numbers(20), 2, shuffle=True, generator=torch.Generator().manual_seed(2)), 2)
    orders = [in_order(read(loaders)) for _ in range(2)]
    assert orders[0] != orders[1]
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_undistributed_every_rank_reads_all() -> None:
    loaders = share_out(lambda _: DataLoader(Numbers(6), 4), 2, distribute=False)
    assert read(loaders) == [[[0, 1, 2, 3], [4, 5]]] * 2


def test_a_loader_set_up_twice_and_what_is_no_loader_are_errors() -> None:
    (loader,) = share_out(lambda _: DataLoader(Numbers(6), 2), 1)
    with pytest.raises(ValueError, match="a loader that it returned before"):
        share_out(lambda _: loader, 1)
    with pytest.raises(TypeError, match="given a `int`, which cannot be iterated"):
        share_out(lambda _: 3, 1)  # type: ignore[arg-type, return-value]


@pytest.mark.filterwarnings(TORCHDATA_BEHIND)
def test_a_stateful_loader_resumes_in_the_order_of_the_interrupted_epoch() -> None:
    def make(rank: int) -> DataLoader[int]:
        return StatefulDataLoader(Numbers(40), 2, shuffle=True)

    torch.manual_seed(1)
    loaders = share_out(make, 2)
    read(loaders)
    heads, states = [], []
    for loader in loaders:
        batches = iter(loader)
        heads.append([next(batches).tolist() for _ in range(4)])
        states.append(copy.deepcopy(loader.state_dict()))
        assert len(list(batches)) == 6
    torch.manual_seed(2)
    resumed = share_out(make, 2)
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    whole = [head + rest for head, rest in zip(heads, read(resumed), strict=True)]
    assert sorted(in_order(whole)) == list(range(40))
    assert read(resumed) == read(loaders)


def test_a_batch_is_what_the_loader_made() -> None:
    (loader,) = share_out(lambda _: [{"x": torch.ones(2)}], 1)
    (batch,) = loader
    assert isinstance(batch["x"], Tensor)


@pytest.mark.parametrize(
    ("size", "batch_size", "has_unequal"), [(7, 3, True), (9, 3, False), (13, 2, True), (12, 2, False)]
)
@pytest.mark.parametrize("in_batches", [False, True])
def test_a_mean_over_batches_of_different_sizes_warns_once_and_a_weight_does_not(
    size: int, batch_size: int, has_unequal: bool, in_batches: bool
) -> None:
    def loader() -> DataLoader[int]:
        if in_batches:
            batches = BatchSampler(SequentialSampler(range(size)), batch_size, False)
            return DataLoader(Numbers(size), batch_sampler=list(batches))  # type: ignore[arg-type]
        return DataLoader(Numbers(size), batch_size)

    for weighted in (False, True):
        reported: list[str] = []
        numbers = [LoopProgress() for _ in range(3)]
        first = share_out([loader() for _ in range(3)], 3, reported=reported, numbers=numbers)[0]
        for _ in range(2):
            for _ in first:
                numbers[0].num_backwards += 1
                numbers[0].num_unweighted += not weighted
        assert len(reported) == (has_unequal and not weighted)
        assert all("had different numbers of samples on the ranks" in sentence for sentence in reported)
