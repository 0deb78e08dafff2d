"""Epochs that the loop leaves before their end: where a run goes on that is resumed from a checkpoint after that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from shares import share_out
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric.loop.accumulation import Accumulation
from fabric.strategies.data.loop_progress import LoopProgress

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Stream(IterableDataset[int]):
    """Another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = self.read = self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.read, self.skipped = self.skipped, 0
        for number in range(self.read, 20):
            self.read += 1
            yield 100 * self.epoch + number

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.skipped = state["epoch"], state["read"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def nodes() -> Any:
    """Batches in another order in each epoch."""
    return Loader(Batcher(Mapper(SamplerWrapper(Ordered()), int), 2))  # type: ignore[arg-type]


class Ordered(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 20))

    def __len__(self) -> int:
        return 20


LOADERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(range(20), 2, shuffle=True, generator=generator()),  # type: ignore[arg-type]
    "stateful": lambda: StatefulDataLoader(range(20), 2, shuffle=True, generator=generator()),  # type: ignore[arg-type]
    "stream": lambda: StatefulDataLoader(Stream(), 2),
}
MORE = {**LOADERS, "nodes": nodes}


def prepared(name: str, state: Any = None, reported: list[str] | None = None, **to: Any) -> Any:
    torch.manual_seed(8)
    numbers = LoopProgress()
    (loader,) = share_out(lambda _: MORE[name](), 1, numbers=[numbers], reported=reported, **to)
    if state is not None:
        loader.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
    return loader, numbers


def first(loader: Any, num_batches: int, numbers: LoopProgress | None = None) -> list[list[int]]:
    """Batches of an iteration that is then left; `numbers`: the loop trains on them."""
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if numbers is not None:
            numbers.num_backwards += 1
        if len(seen) == num_batches:
            break
    return seen


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("use", ["train", "validate"])
def test_an_evaluation_that_was_left_early_begins_anew_in_a_resumed_run(name: str, use: Any) -> None:
    loader, _ = prepared(name, use=use)
    first(loader, 3)
    state = loader.state_of_run() if use == "train" else loader.state_dict()
    resumed, _ = prepared(name, state, use=use)
    again = resumed.state_of_run()
    expected = first(loader, 3)
    assert first(resumed, 3) == expected
    assert first(prepared(name, again, use=use)[0], 3) == expected


@pytest.mark.parametrize("name", LOADERS)
def test_training_that_was_left_early_goes_on_there_or_in_the_epoch_that_was_chosen(name: str) -> None:
    reported: list[str] = []
    loader, numbers = prepared(name, reported=reported)
    loader.set_epoch(0)
    first(loader, 3, numbers)
    state = loader.state_of_run()
    resumed, _ = prepared(name, state)
    whole, _ = prepared(name)
    assert first(resumed, 9) == first(whole, 10)[3:]
    resumed, _ = prepared(name, state)
    for each in (loader, resumed):
        each.set_epoch(1)
    assert first(resumed, 10) == first(loader, 10, numbers)
    assert reported == []


@pytest.mark.parametrize("name", LOADERS)
def test_a_look_at_one_batch_of_a_resumed_loader_does_not_move_it(name: str) -> None:
    loader, numbers = prepared(name)
    first(loader, 3, numbers)
    resumed, _ = prepared(name, loader.state_of_run())
    looked = first(resumed, 1)
    again, _ = prepared(name, resumed.state_of_run())
    rest = first(resumed, 9)
    assert len(rest) == 7
    assert looked == rest[:1]
    assert first(again, 9) == rest


@pytest.mark.parametrize("name", LOADERS)
def test_an_iterator_that_was_made_before_the_state_was_loaded_begins_where_it_was_saved(name: str) -> None:
    loader, _ = prepared(name)
    batches = iter(loader)
    first(batches, 3)
    state = copy.deepcopy(loader.state_dict())
    rest, following = first(batches, 9), first(loader, 9)
    resumed, _ = prepared(name)
    early = iter(resumed)
    resumed.load_state_dict(state)
    assert len(rest) == 7
    assert first(early, 9) == rest
    assert first(resumed, 9) == following


def windows(loader: Any, numbers: LoopProgress) -> Iterator[list[Any]]:
    return Accumulation(numbers).windows(loader, 4, nullcontext)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("name", MORE)
def test_in_the_last_window_of_an_epoch_the_loop_is_within_it(name: str) -> None:
    """Although its last, shorter window was found by reading ahead: `epoch` in the loop is still its number."""
    states = []
    loader, numbers = prepared(name)
    for window in windows(loader, numbers):
        list(window)
        states.append(loader.state_dict())
    following = [batch for window in windows(loader, numbers) for batch in window]
    state = states[-1]
    for _ in range(2):
        resumed, numbers = prepared(name, state)
        state = resumed.state_dict()
    assert list(windows(resumed, numbers)) == []
    again = [batch for window in windows(resumed, numbers) for batch in window]
    assert len(again) == 10
    assert str(again) == str(following)


def test_a_stateful_loader_of_a_shared_stream_can_be_resumed_twice_in_an_epoch() -> None:
    def make() -> list[Any]:
        return share_out(lambda _: StatefulDataLoader(Unstated(), 2), 2)

    whole = [[batch.tolist() for batch in loader] for loader in make()]
    states: list[Any] = [None, None]
    for place in range(3):
        for rank, loader in enumerate(make()):
            if states[rank] is not None:
                loader.load_state_dict(states[rank])  # type: ignore[attr-defined]
            for batch in loader:
                assert batch.tolist() == whole[rank][place]
                states[rank] = loader.state_dict()  # type: ignore[attr-defined]
                break


class Unstated(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))
