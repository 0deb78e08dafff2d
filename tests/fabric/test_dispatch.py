"""Rank 0 reads a loader for all ranks: whole batches in turn, and its errors everywhere."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies.data.dispatch import DispatchError


class Ragged(IterableDataset[Any]):
    """Batches of different lengths, read on rank 0 alone."""

    def __init__(self, rank: int, num_batches: int, *, fails: bool = False) -> None:
        self.rank, self.num_batches, self.fails = rank, num_batches, fails

    def __iter__(self) -> Iterator[Any]:
        assert self.rank == 0
        for number in range(self.num_batches):
            if self.fails and number == 5:
                raise OSError("the disk is gone")
            yield torch.arange(number) + 10 * number


class Pair(NamedTuple):
    numbers: Tensor
    name: str


def ranks(world: World) -> Fabric:
    fabric = Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=world.size)
    fabric._connect(world)
    return fabric


def loader(rank: int, num_batches: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Ragged(rank, num_batches, **options), batch_size=None)


def dispatched(world: World) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with ranks(world) as fabric:
        rank = fabric.global_rank
        prepared = fabric.setup_dataloaders(loader(rank, 7), dispatch=True)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        seen["train"] = [batch.tolist() for batch in prepared]
        seen["drew"] = not torch.equal(before, torch.get_rng_state())
        validate = fabric.setup_dataloaders(loader(rank, 7), dispatch=True, use="validate")
        batches = [batch + 0 for batch in validate]
        seen["validate"] = [batch.tolist() for batch in batches]
        seen["gathered"] = fabric.gather_for_metrics(batches, validate).tolist()
        nests = [Pair(torch.ones(2, dtype=torch.bfloat16), "a"), UserDict(x=torch.zeros(0, 3), y=[torch.tensor(4)])]
        seen["nests"] = list(fabric.setup_dataloaders(nests if rank == 0 else [], dispatch=True))
        for number, _ in enumerate(prepared):
            if number == 1:
                break
        seen["state"] = prepared.state_dict()  # type: ignore[attr-defined]
        again = fabric.setup_dataloaders(loader(rank, 7), dispatch=True)
        again.load_state_dict(seen["state"])  # type: ignore[attr-defined]
        seen["resumed"] = [batch.tolist() for batch in again]
        received = []
        try:
            for batch in fabric.setup_dataloaders(loader(rank, 7, fails=True), dispatch=True):
                received.append(batch.tolist())
                fabric.barrier()  # a collective of the loop is not in the way
        except (OSError, DispatchError) as error:
            seen["error"] = type(error).__name__, str(error)
        seen["received"] = received
        assert fabric.all_reduce(1.0, reduce_op="sum") == world.size
    return seen


ALL = [[number * 10 + each for each in range(number)] for number in range(7)]


@pytest.mark.slow
def test_rank_zero_reads_and_ranks_get_whole_batches_in_turn() -> None:
    seen = run_world(2, dispatched)
    for rank, each in enumerate(seen):
        assert each["train"] == ALL[rank:6:2]
        assert each["validate"] == ALL[rank::2]
        assert not each["drew"]
        assert each["gathered"] == [number for batch in ALL for number in batch]
        assert each["resumed"] == ALL[rank:6:2][2:]
        assert each["received"] == ALL[rank:4:2]
    assert seen[0]["error"] == ("OSError", "the disk is gone")
    words = "The loader that rank 0 reads for all ranks raised OSError: the disk is gone"
    assert seen[1]["error"] == ("DispatchError", words)
    (pair,), (mapping,) = seen[0]["nests"], seen[1]["nests"]
    assert (type(pair), pair.name, pair.numbers.dtype, pair.numbers.tolist()) == (Pair, "a", torch.bfloat16, [1, 1])
    assert type(mapping) is UserDict
    assert mapping["x"].shape == (0, 3)
    assert mapping["y"][0] == 4


def test_one_rank_reads_its_own_loader_and_contradicting_options_raise() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        assert [batch.tolist() for batch in fabric.setup_dataloaders(loader(0, 7), dispatch=True)] == ALL
        with pytest.raises(ValueError, match=r"`setup_dataloaders\(dispatch=True, uneven='stop'\)`: rank 0 reads"):
            fabric.setup_dataloaders(loader(0, 7), dispatch=True, uneven="stop")
