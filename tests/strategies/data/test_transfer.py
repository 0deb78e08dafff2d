"""Batches on the device: every nest keeps its type, and an accelerator copies one batch ahead."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from shares import ranks_by
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from fabric.strategies.data.context import LoaderContext
from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.loaders import process_dataloader
from fabric.strategies.data.loop_progress import LoopProgress
from fabric.strategies.data.partition import Share
from fabric.strategies.data.transfer import move, one_ahead

META = torch.device("meta")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str
    twice: torch.Tensor = field(init=False, default_factory=lambda: torch.ones(1))


class Graph:
    """Moves itself, as batches of graphs and tokens do."""

    def __init__(self, where: str) -> None:
        self.where = where

    def to(self, device: torch.device) -> Graph:
        return Graph(device.type)


def loader_on(device: torch.device, loader: Any, *, move: bool = True) -> DeviceLoader:
    context = LoaderContext(
        share=Share(),
        ranks=ranks_by(lambda obj: [obj], 1),
        device=device,
        launcher="inline",
        progress=LoopProgress(),
        report=lambda sentence: None,
    )
    return process_dataloader(loader, context, move=move)


def test_nested_batches_are_moved_and_keep_their_types() -> None:
    x = torch.ones(2)
    groups = defaultdict(list, {"a": [x]})
    batch = {
        "tuple": (x, 1),
        "pair": Pair(x, [x]),
        "list": [x, None],
        "dict": OrderedDict(b=x, a=x),
        "groups": groups,
        "sample": Sample(x, "one"),
        "graph": Graph("cpu"),
        "packed": pack_sequence([x]),
        "text": "text",
    }
    moved = move(batch, META)
    assert moved["tuple"][0].is_meta
    assert moved["tuple"][1] == 1
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].x.is_meta
    assert moved["pair"].y[0].is_meta
    assert moved["list"][0].is_meta
    assert moved["list"][1] is None
    assert type(moved["dict"]) is OrderedDict
    assert list(moved["dict"]) == ["b", "a"]
    assert moved["groups"]["a"][0].is_meta
    assert moved["groups"].default_factory is list
    assert isinstance(moved["sample"], Sample)
    assert moved["sample"].x.is_meta
    assert moved["sample"].twice.is_meta
    assert moved["sample"].name == moved["text"].replace("text", "one")
    assert moved["graph"].where == "meta"
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.is_meta
    assert not batch["sample"].x.is_meta  # type: ignore[attr-defined]
    assert not groups["a"][0].is_meta


def test_a_loader_moves_its_batches_only_on_request() -> None:
    plain = DataLoader(TensorDataset(torch.arange(4)), 2)
    assert all(batch[0].is_meta for batch in loader_on(META, plain))
    assert not any(batch[0].is_meta for batch in loader_on(META, plain, move=False))


def test_on_the_cpu_batches_are_those_of_the_loader_themselves() -> None:
    batches = [object(), object()]
    assert list(loader_on(torch.device("cpu"), batches)) == batches


@pytest.fixture
def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [True, False])
def test_an_accelerator_gets_the_values_of_the_loader(accelerator: torch.device, pin_memory: bool) -> None:
    data = torch.randn(64, 1000)
    loader = loader_on(accelerator, DataLoader(TensorDataset(data), 8, pin_memory=pin_memory))
    batches = [batch[0] for batch in loader]
    assert {batch.device.type for batch in batches} == {accelerator.type}
    torch.testing.assert_close(torch.cat(batches).cpu(), data)


@pytest.mark.gpu
def test_memory_of_a_batch_is_not_reused_while_the_loop_computes_on_it(accelerator: torch.device) -> None:
    sums = []
    weights = torch.ones(512, 512, device=accelerator)
    for batch in one_ahead(iter([torch.full((512, 512), float(i)).pin_memory() for i in range(8)]), accelerator):
        for _ in range(20):
            weights @ weights  # the stream is busy when the batch is dropped
        sums.append(batch.sum())
        del batch
    assert [value.item() for value in sums] == [512.0 * 512.0 * i for i in range(8)]


@pytest.mark.gpu
def test_the_next_batch_is_copied_before_the_loop_asks_for_it(accelerator: torch.device) -> None:
    fetched = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(3):
            fetched.append(number)
            yield torch.full((8,), number).pin_memory()

    ahead = one_ahead(batches(), accelerator)
    assert next(ahead).tolist() == [0] * 8
    assert fetched == [0, 1]
    assert [batch[0].item() for batch in ahead] == [1, 2]


@pytest.mark.gpu
def test_a_plain_iterable_is_not_read_ahead(accelerator: torch.device) -> None:
    fetched = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(3):
            fetched.append(number)
            yield torch.tensor(number)

    moved = iter(loader_on(accelerator, batches()))
    assert next(moved).device.type == accelerator.type
    assert fetched == [0]
