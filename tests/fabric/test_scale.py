"""What a rank sends does not grow with the number of ranks: messages and store requests are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies.collectives import flight_recorder, process_group

NUM_FIRST_STEPS = 5
"""DDP arranges its buckets anew in the second step, and guards of the first steps end."""

# Of one rank, at every size, with what the backend itself sends.
MESSAGES = {
    "ddp": {"setup": 4, "loader": 5, "batch": 0, "step": 3, "clip": 0, "all_reduce": 2, "barrier": 1},
    "fsdp": {"setup": 4, "loader": 5, "batch": 0, "step": 6, "clip": 1, "all_reduce": 2, "barrier": 1},
    "deepspeed_stage_2": {"setup": 10, "loader": 5, "batch": 0, "step": 6, "clip": 1, "all_reduce": 2, "barrier": 1},
}


class CountedStore(dist.Store):
    """A store that counts the requests to another one, of torch's C++ code as well."""

    def __init__(self, store: Any, requests: Counter[str] | None = None) -> None:
        super().__init__()
        self._store = store
        self.requests: Counter[str] = Counter() if requests is None else requests

    def clone(self) -> CountedStore:
        return CountedStore(self._store.clone(), self.requests)

    @property
    def timeout(self) -> Any:
        return self._store.timeout

    def set_timeout(self, timeout: Any) -> None:
        self._store.set_timeout(timeout)


def _counted(name: str) -> Any:
    def ask(self: CountedStore, *args: Any) -> Any:
        self.requests[name] += 1
        return getattr(self._store, name)(*args)

    return ask


for _name in ("set", "get", "add", "wait", "check", "multi_get", "multi_set", "compare_set", "delete_key", "append"):
    setattr(CountedStore, _name, _counted(_name))


def num_messages() -> int:
    groups = [group for found in flight_recorder._read(calls=False) for group in found.get("pg_status", {}).values()]
    return sum(max(0, int(group["last_enqueued_collective"])) for group in groups)


def counts(world: World, strategy: str, folder: str) -> dict[str, tuple[int, int]]:
    """Messages and store requests of this rank, for each thing that a loop does."""
    join, stores = process_group.join, []

    def counted(*args: Any) -> Any:
        stores.append(CountedStore(join(*args)))
        return stores[-1]

    process_group.join = counted
    found: dict[str, tuple[int, int]] = {}
    before = (0, 0)

    def note(what: str) -> None:
        nonlocal before
        now = num_messages(), stores[0].requests.total()
        found[what] = now[0] - before[0], now[1] - before[1]
        before = now

    with Fabric(accelerator=ACCELERATOR, strategy=strategy, launcher="external") as fabric:
        fabric.launch()
        note("launch")
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        note("setup")
        dataset = TensorDataset(torch.randn(2 * world.size * (NUM_FIRST_STEPS + 1), 4))
        loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=2, shuffle=True))
        note("loader")
        for (batch,) in loader:
            note("batch")
            fabric.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            note("step")
        fabric.backward(model(batch).sum())
        note("backward")
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        note("clip")
        fabric.all_reduce(torch.ones(()))
        note("all_reduce")
        fabric.barrier()
        note("barrier")
        fabric.save(f"{folder}/{world.size}", {"model": model, "optimizer": optimizer})
        note("save")
        fabric.load(f"{folder}/{world.size}", {"model": model, "optimizer": optimizer})
        note("load")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("ddp", (2, 4, 8)),
        ("fsdp", (2, 4)),
        pytest.param("fsdp", (8, 16), marks=pytest.mark.thorough),
        pytest.param("deepspeed_stage_2", (2, 4, 8), marks=pytest.mark.thorough),
    ],
)
def test_the_messages_of_a_rank_do_not_grow_with_the_number_of_ranks(
    strategy: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    limits = MESSAGES[strategy]
    for size in sizes:
        for rank, found in enumerate(run_world(size, counts, strategy, str(tmp_path))):
            messages, requests = ({what: each[i] for what, each in found.items()} for i in (0, 1))
            assert {what: messages[what] for what in limits} == limits, (size, rank)
            assert (messages["save"] <= 8, messages["load"] <= 10) == (True, True), (size, rank)
            # gloo connects all pairs of ranks, and reads the address of each.
            assert requests["launch"] <= 6 + 2 * size, (size, rank)
            assert not any(
                requests[what] for what in ("loader", "batch", "step", "clip", "all_reduce", "barrier", "save")
            )
