"""Epochs that the loop leaves before their end: where a run goes on that is resumed from a checkpoint after that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shares import share_out
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric.strategies.data.loader_check import LoaderNumbers

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


LOADERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(range(20), 2, shuffle=True, generator=generator()),  # type: ignore[arg-type]
    "stateful": lambda: StatefulDataLoader(range(20), 2, shuffle=True, generator=generator()),  # type: ignore[arg-type]
    "stream": lambda: StatefulDataLoader(Stream(), 2),
}


def prepared(name: str, state: Any = None, said: list[str] | None = None, **to: Any) -> Any:
    torch.manual_seed(8)
    numbers = LoaderNumbers()
    (loader,) = share_out(lambda _: LOADERS[name](), 1, numbers=[numbers], said=said, **to)
    if state is not None:
        loader.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
    return loader, numbers


def first(loader: Any, num_batches: int, numbers: LoaderNumbers | None = None) -> list[list[int]]:
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
    said: list[str] = []
    loader, numbers = prepared(name, said=said)
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
    assert said == []
    first(loader, 3, numbers)
    loader.state_of_run()
    for _ in range(2):
        first(loader, 3, numbers)
        loader.state_of_run()
    (sentence,) = said
    assert "left an epoch of the" in sentence
    assert "Call `loader.set_epoch(epoch)` before each epoch" in sentence


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


@pytest.mark.parametrize("name", ["plain", "stateful"])
def test_a_zip_that_ends_at_once_leaves_the_epochs_of_its_other_loaders(name: str) -> None:
    loader, numbers = prepared(name)
    seen = []
    for _ in zip(range(3), loader, strict=False):
        numbers.num_backwards += 1
        seen.append(loader.state_dict())
    resumed, _ = prepared(name, seen[-1])
    assert list(zip([], resumed, strict=False)) == []
    assert first(resumed, 10) == first(loader, 10)
