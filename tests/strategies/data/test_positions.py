"""The position of a loader: where the loop stands, saved and gone on from, with as many ranks or others."""

from __future__ import annotations

import copy
import pickle
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from shares import in_order, read, share_out
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.rng import process_rngs


class Numbers(Dataset[int]):
    """Counts what is loaded."""

    loaded: ClassVar[list[int]] = []

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Augmented(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random(), float(np.random.rand())


class Stream(IterableDataset[int]):
    """Shuffles by the global generators as it goes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        items = list(range(self.size))
        while items:
            yield items.pop(random.randrange(len(items)))


class Shards(Stream):
    """Each rank reads a part of its own."""

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(self.size // num_shards)


class Drawing(Sampler[int]):
    """Draws from the global generators as it goes, without end in sight."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield int(torch.randint(1000, ())) + random.randrange(2) + int(np.random.randint(2))


def by_generator(size: int) -> RandomSampler:
    return RandomSampler(range(size), generator=torch.Generator().manual_seed(3))


def by_numpy(size: int) -> Sampler[int]:
    class Permuted(Sampler[int]):
        def __init__(self) -> None:
            self.generator, self.old = np.random.default_rng(4), np.random.RandomState(5)

        def __iter__(self) -> Iterator[int]:
            return iter(self.old.permutation(self.generator.permutation(size)).tolist())

        def __len__(self) -> int:
            return size

    return Permuted()


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Numbers(45), 4, shuffle=True),
    "last dropped": lambda: DataLoader(Numbers(45), 4, shuffle=True, drop_last=True),
    "by a generator": lambda: DataLoader(Numbers(45), 4, sampler=by_generator(45)),
    "by numpy": lambda: DataLoader(Numbers(45), 4, sampler=by_numpy(45)),
    "drawn late": lambda: DataLoader(Numbers(2000), 4, sampler=Drawing(45)),
    "batches": lambda: DataLoader(Numbers(45), batch_sampler=[*BatchSampler(by_generator(45), 4, False)]),
    "uneven batches": lambda: DataLoader(Numbers(20), batch_sampler=[[1, 2, 3], [4, 5], [6], [7, 8], [9, 10, 11]]),
    "unbatched": lambda: DataLoader(Numbers(24), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(45), 4),
    "list": lambda: [torch.tensor([number]) for number in range(24)],
}


CHANCE = random.Random(random.randrange(2**31))


def stopped(loaders: list[DeviceLoader], num_batches: int) -> tuple[list[list[Any]], list[Any]]:
    """The batches of each rank, and the state while the last of them is at work, as a file would hold it."""
    shares, states = [], []
    for loader in loaders:
        batches = iter(loader)
        shares.append(read([[next(batches) for _ in range(num_batches)]])[0])  # type: ignore[list-item]
        states.append(saved(loader))
    return shares, states


def saved(loader: Any) -> Any:
    """What a checkpoint has: the state of the loader, and those of the generators."""
    generators = {name: rng.read() for name, rng in process_rngs().items()}
    return pickle.loads(pickle.dumps((loader.state_dict(), generators)))


def resumed(make: Callable[[], Any], count: int, states: list[Any]) -> list[Any]:
    torch.manual_seed(CHANCE.randrange(2**31)), random.seed(torch.initial_seed()), np.random.seed(CHANCE.randrange(99))
    loaders: list[Any] = share_out(lambda _: make(), count)
    for loader, state in zip(loaders, states, strict=True):
        load(loader, state)
    return loaders


def load(loader: Any, state: Any) -> None:
    """Load what `saved` returned."""
    of_loader, generators = state
    loader.load_state_dict(copy.deepcopy(of_loader))
    for name, rng in process_rngs().items():
        rng.write(generators[name])


def seed(number: int) -> None:
    torch.manual_seed(number), random.seed(number), np.random.seed(number)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_stopped_at_any_batches_reads_what_one_reads_that_never_stopped(name: str, count: int) -> None:
    make = LOADERS[name]
    seed(8)
    loaders = share_out(lambda _: make(), count)
    whole, following = read(loaders), read(loaders)
    num_batches = min(map(len, whole))
    for first in range(1, num_batches + 1):
        seed(8)
        heads, states = stopped(share_out(lambda _: make(), count), first)
        second = CHANCE.randint(0, num_batches - first)
        again: list[Any] = resumed(make, count, states)
        if second:
            middles, states = stopped(again, second)
            heads = [head + middle for head, middle in zip(heads, middles, strict=True)]
            again = resumed(make, count, states)
        assert [head + rest for head, rest in zip(heads, read(again), strict=True)] == whole, (first, second)
        assert read(again) == following, (first, second)


@pytest.mark.parametrize("sampler", ["shuffled", "by a generator", "batches"])
def test_another_number_of_ranks_goes_on_in_the_same_order_of_samples(sampler: str) -> None:
    def make(batch_size: int) -> Any:
        if sampler == "shuffled":
            return DataLoader(Numbers(48), batch_size, shuffle=True)
        batches = BatchSampler(by_generator(48), batch_size, False)
        return DataLoader(Numbers(48), batch_sampler=batches if sampler == "batches" else list(batches))

    seed(8)
    whole = in_order(read(share_out(lambda _: make(8), 1)))
    seed(8)
    seen, states = [], []
    loaders: list[Any] = share_out(lambda _: make(4), 2)
    for count, num_batches in ((2, 2), (4, 1), (1, 2), (2, 1)):
        if states:
            loaders = resumed(lambda n=count: make(8 // n), count, [states[0]] * count)  # type: ignore[misc]
        shares, states = stopped(loaders, num_batches)
        seen += in_order(shares)
        assert seen == whole[: len(seen)]
    assert seen == whole


def test_another_global_batch_goes_on_after_the_same_sample() -> None:
    seed(8)
    loaders = share_out(lambda _: DataLoader(Numbers(45), 4, shuffle=True), 2)
    whole = in_order(read(loaders))
    seed(8)
    heads, states = stopped(share_out(lambda _: DataLoader(Numbers(45), 4, shuffle=True), 2), 3)
    rest = read(resumed(lambda: DataLoader(Numbers(45), 3, shuffle=True), 3, [states[0]] * 3))
    assert in_order(heads) + in_order(rest) == whole


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_skipped_is_not_loaded(size: int) -> None:
    def make(_: int = 0) -> Any:
        return DataLoader(Numbers(40), 4, shuffle=True)

    _, states = stopped(share_out(make, size), 3)
    loaders = resumed(make, size, states)
    Numbers.loaded.clear()
    batches = read(loaders)
    assert sorted(Numbers.loaded) == sorted(index for of_rank in batches for batch in of_rank for index in batch)
    assert [len(of_rank) for of_rank in batches] == [40 // (4 * size) - 3] * size


@pytest.mark.slow
def test_batches_in_any_order_have_a_position_at_the_start_of_their_epoch() -> None:
    def make(_: int = 0) -> Any:
        return DataLoader(Numbers(12), 2, num_workers=1, in_order=False)

    _, states = stopped(share_out(make, 2), 2)
    assert [len(share) for share in read(resumed(make, 2, states))] == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Augmented, Stream])
def test_workers_that_prefetch_repeat_what_they_draw(kind: Any, persistent: bool) -> None:
    def make(num_workers: int = 2) -> Any:
        options = {"prefetch_factor": 3, "persistent_workers": persistent}
        return DataLoader(kind(44), 2, shuffle=kind is Augmented or None, num_workers=num_workers, **options)  # type: ignore[arg-type]

    def rows(loaders: list[Any]) -> list[Any]:
        return [[torch.as_tensor(batch).tolist() for batch in map(stacked, loader)] for loader in loaders]

    def stacked(batch: Any) -> Any:
        return torch.stack(batch, 1) if isinstance(batch, list) else batch

    seed(8)
    loaders = share_out(lambda _: make(), 2)
    whole, following = rows(loaders), rows(loaders)
    assert whole[0] != whole[1]
    seed(8)
    states = []
    for loader in share_out(lambda _: make(), 2):
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        states.append(saved(loader))
    for num_workers in (2, 1) if kind is Augmented else (2,):
        again = resumed(lambda n=num_workers: make(n), 2, states)  # type: ignore[misc]
        assert rows(again) == [share[5:] for share in whole]
        assert rows(again) == following


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("generated", [False, True])
def test_an_epoch_that_kept_its_workers_is_resumed_by_new_ones(kind: Any, generated: bool) -> None:
    def make() -> Any:
        seed(8)
        generator = torch.Generator().manual_seed(9) if generated else None
        return share_out(
            lambda _: kind(Augmented(8), 2, shuffle=True, generator=generator, num_workers=1, persistent_workers=True),
            1,
        )[0]

    loader = make()
    epochs = [[torch.stack(batch).tolist() for batch in loader] for _ in range(3)]
    loader = make()
    list(loader)
    states = [saved(loader)]
    for _ in zip(range(3), loader, strict=False):
        states.append(saved(loader))
    for number, state in enumerate(states[::2]):
        loader = make()
        load(loader, state)
        assert [torch.stack(batch).tolist() for batch in loader] == epochs[1][2 * number :]
        assert [torch.stack(batch).tolist() for batch in loader] == epochs[2]


@pytest.mark.slow
@pytest.mark.parametrize("distribute", [True, False])
def test_a_stream_of_a_ranks_own_that_kept_its_workers_is_resumed_by_new_ones(distribute: bool) -> None:
    def make() -> Any:
        seed(8)
        options: Any = {"num_workers": 1, "persistent_workers": True}
        return share_out(lambda _: DataLoader(Shards(24), 2, **options), 2, distribute=distribute)[1]

    loader = make()
    epochs = [read([loader]) for _ in range(3)]
    assert epochs[0] != epochs[1]
    loader = make()
    read([loader])
    for _ in zip(range(3), loader, strict=False):
        state = saved(loader)
    loader = make()
    load(loader, state)
    assert read([loader]) == [epochs[1][0][3:]]
    assert read([loader]) == epochs[2]


def test_a_peek_does_not_move_the_position_and_a_break_does() -> None:
    (loader, *_) = share_out(lambda _: DataLoader(Numbers(40), 4, shuffle=True), 2)
    before = str(loader.state_dict())
    next(iter(loader))
    assert str(loader.state_dict()) == before
    for number, _ in enumerate(loader):
        if number == 2:
            next(iter(loader))
            break
    assert loader.state_dict()["cursor"] | {"epoch": 0, "batches": 3, "samples": 24} == loader.state_dict()["cursor"]
    list(loader)
    assert loader.state_dict()["cursor"] | {"epoch": 2, "batches": 0, "samples": 0} == loader.state_dict()["cursor"]


def test_an_epoch_that_the_user_chooses_begins_with_its_first_batch() -> None:
    def make() -> Any:
        return DataLoader(Numbers(40), 4, shuffle=True)

    _, states = stopped(share_out(lambda _: make(), 1), 7)
    for epoch, num_batches in ((0, 3), (1, 10)):
        (loader,) = resumed(make, 1, states)
        loader.set_epoch(epoch)
        assert len(list(loader)) == num_batches


class Told:
    """An order that follows from the epoch alone, known by a name of its own."""

    def __init__(self) -> None:
        self.rotation = 0

    def set_epoch(self, epoch: int) -> None:
        self.rotation = 7 * epoch

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return (number for start in [self.rotation] for number in [*range(start, 40), *range(start)])


class Shown(Told):
    """Its epoch is known, as that of torch's `DistributedSampler`."""

    def __init__(self) -> None:
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.rotation = epoch, 7 * epoch


class Advancing(Shown):
    """Sets the next epoch itself, once all indices are drawn."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


class ToldStream(Shown, IterableDataset[int]):
    """A stream that is told its epoch."""


TOLD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "loader": (lambda: DataLoader(Numbers(40), 4, sampler=Told()), lambda loader: loader),
    "sampler": (lambda: DataLoader(Numbers(40), 4, sampler=Shown()), lambda loader: loader.sampler),
    "advancing": (lambda: DataLoader(Numbers(40), 4, sampler=Advancing()), lambda loader: loader.sampler),
    "loader with workers": (lambda: DataLoader(Numbers(40), 4, sampler=Told(), num_workers=1), lambda loader: loader),
    "dataset": (lambda: DataLoader(ToldStream(), 4), lambda loader: loader.dataset),
    "stateful": (lambda: StatefulDataLoader(ToldStream(), 4), lambda loader: loader),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", TOLD)
def test_the_epoch_that_the_user_has_set_is_in_the_position(name: str, count: int) -> None:
    make, told = TOLD[name]
    loaders = share_out(lambda _: make(), count)
    for loader in loaders:
        told(loader).set_epoch(2)
    heads, states = stopped(loaders, 3)
    _, again = stopped(resumed(make, count, states), 1)
    rests = read(resumed(make, count, again))
    loaders = resumed(make, count, states)
    order = [number % 40 for number in range(14, 54)]
    assert [head[0][0] for head in heads] == [order[4 * rank] for rank in range(count)]
    assert in_order(rests) == order[16 * count :]
    assert in_order(read(loaders)) == order[12 * count :]
    following = 21 if name == "advancing" else 14
    assert in_order(read(loaders)) == [number % 40 for number in range(following, following + 40)]


@pytest.mark.parametrize("name", ["shuffled", "by a generator", "stream"])
def test_an_iterator_that_was_made_before_the_position_was_loaded_begins_there(name: str) -> None:
    make = LOADERS[name]
    _, states = stopped(share_out(lambda _: make(), 1), 3)
    expected = read(resumed(make, 1, states))
    (early,) = share_out(lambda _: make(), 1)
    batches = iter(early)
    load(early, states[0])
    assert len(expected[0]) == 9
    assert read([batches]) == expected  # type: ignore[list-item]
    assert len(read([early])[0]) == 12


def test_a_state_that_was_loaded_is_that_of_the_loader() -> None:
    _, states = stopped(share_out(lambda _: DataLoader(Numbers(40), 4, shuffle=True), 1), 7)
    (loader,) = resumed(lambda: DataLoader(Numbers(40), 4, shuffle=True), 1, states)
    assert str(loader.state_dict()) == str(states[0][0])
    next(iter(loader))
    assert str(loader.state_dict()) == str(states[0][0])


def test_a_position_in_other_data_is_an_error() -> None:
    _, ((state, _),) = stopped(share_out(lambda _: DataLoader(Numbers(40), 4), 1), 7)
    (loader,) = share_out(lambda _: DataLoader(Numbers(41), 4), 1)
    with pytest.raises(ValueError, match="a loader over 40 samples, and this `DataLoader` has 41"):
        loader.load_state_dict(state)
    for missing in ("process", "generators"):
        older = {**state, "order": {name: value for name, value in state["order"].items() if name != missing}}
        with pytest.raises(ValueError, match="the position of a loader as another version of torchfabric writes it"):
            loader.load_state_dict(older)
    _, ((state, _),) = stopped(share_out(lambda _: DataLoader(Stream(40), 4), 1), 7)
    (loader,) = share_out(lambda _: DataLoader(Stream(40), 5), 1)
    with pytest.raises(ValueError, match="read 4 samples per step on 1 ranks, and this `DataLoader` reads 5 on 1"):
        loader.load_state_dict(state)
    with pytest.raises(ValueError, match="one order for all ranks was given to one that reads one of several parts"):
        share_out(lambda _: DataLoader(Numbers(40), 4), 2, distribute=False)[0].load_state_dict(state)
    _, (state, *_) = stopped(share_out(lambda _: DataLoader(Numbers(45), batch_sampler=[[1, 2]] * 9), 1), 7)
    (loader,) = resumed(lambda: DataLoader(Numbers(45), batch_sampler=[[1, 2, 3]] * 9), 1, [state])
    with pytest.raises(
        ValueError, match="after 14 samples of the epoch in 7 batches per rank; here these batches have 21"
    ):
        list(loader)
    (loader, _) = resumed(lambda: DataLoader(Numbers(45), batch_sampler=[[1, 2, 3]] * 9), 2, [state] * 2)
    with pytest.raises(ValueError, match="after 14 samples of the epoch, and no batch of the batch sampler ends there"):
        list(loader)


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no shuffling": (
        lambda: DataLoader(Numbers(40), 4, shuffle=True),
        lambda: DataLoader(Numbers(40), 4),
    ),
    "shuffling": (
        lambda: DataLoader(Numbers(40), 4),
        lambda: DataLoader(Numbers(40), 4, shuffle=True),
    ),
    "other batches": (
        lambda: DataLoader(Numbers(40), batch_sampler=[[index, index + 1] for index in range(0, 40, 2)]),
        lambda: DataLoader(Numbers(40), batch_sampler=[[index, index + 1] for index in range(38, -1, -2)]),
    ),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", CHANGED)
def test_a_run_that_resumes_with_another_order_raises_and_says_how_both_begin(name: str, count: int) -> None:
    saved, changed = CHANGED[name]
    _, states = stopped(share_out(lambda _: saved(), 1), 3)
    for loader in resumed(changed, count, [states[0]] * count):
        with pytest.raises(ValueError, match=r"whose epoch begins with the samples \[.+\]; here it begins with \[.+\]"):
            list(loader)


@pytest.mark.parametrize("count", [1, 2])
def test_batches_and_streams_over_longer_data_are_an_error(count: int) -> None:
    class Counted(Stream):
        def __len__(self) -> int:
            return self.size

    def in_batches(size: int) -> Any:
        return DataLoader(Numbers(size), batch_sampler=[[index] for index in range(size)])

    for make in (in_batches, lambda size: DataLoader(Counted(size), 2)):
        _, (states, *_) = stopped(share_out(lambda _, make=make: make(40), count), 3)  # type: ignore[misc]
        (loader, *_) = share_out(lambda _, make=make: make(44), count)  # type: ignore[misc]
        with pytest.raises(ValueError, match="a loader over 40 samples, and this `DataLoader` has 44"):
            loader.load_state_dict(states[0])


def read_ahead(loader: Any, batches: queue.Queue[Any]) -> threading.Thread:
    """A thread that puts each batch and the position after it."""

    def put() -> None:
        for batch in loader:
            batches.put((batch.tolist(), loader.state_dict()))

    thread = threading.Thread(target=put)
    thread.start()
    return thread


@pytest.mark.parametrize("count", [1, 2])
def test_the_position_of_a_loader_that_a_thread_reads_is_known_there_and_between_epochs(count: int) -> None:
    def make() -> Any:
        return DataLoader(Numbers(40), 4, shuffle=True)

    (loader, *_) = share_out(lambda _: make(), count)
    batches: queue.Queue[Any] = queue.Queue()
    read_ahead(loader, batches).join()
    with pytest.raises(RuntimeError, match=r"The position of this `DataLoader` is not known\. A thread of the program"):
        loader.state_dict()
    found = [batches.get() for _ in range(10 // count)]
    (rest, *_) = share_out(lambda _: make(), count)
    rest.load_state_dict(found[2][1])
    assert [batch.tolist() for batch in rest] == [batch for batch, _ in found[3:]]
    loader.set_epoch(1)
    assert loader.state_dict()["cursor"]["epoch"] == 1
    list(loader)
    assert loader.state_dict()["cursor"]["epoch"] == 2


class ReadAhead(DataLoader[Any]):
    """Reads ahead by a thread of its own, as MONAI's `ThreadDataLoader` does."""

    def __iter__(self) -> Any:
        batches: queue.Queue[Any] = queue.Queue(2)
        source = super().__iter__()

        def put() -> None:
            for batch in source:
                batches.put(batch)
            batches.put(None)

        thread = threading.Thread(target=put)
        thread.start()
        yield from iter(batches.get, None)
        thread.join()


def test_a_loader_that_reads_ahead_by_itself_has_the_position_of_the_loop() -> None:
    def make() -> Any:
        return ReadAhead(Numbers(40), 4, shuffle=True)

    (loader,) = share_out(lambda _: make(), 1)
    found, states = list[Any](), list[Any]()
    for batch in loader:
        found.append(batch.tolist())
        states.append(copy.deepcopy(loader.state_dict()))
    (rest,) = share_out(lambda _: make(), 1)
    rest.load_state_dict(states[2])
    assert [batch.tolist() for batch in rest] == found[3:]
