"""Loaders in real processes: what the ranks agree on travels, and their own random numbers do not matter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from shares import in_order, ranks_by
from torch import distributed
from torch.utils.data import DataLoader
from worlds import run_world

from fabric.launchers.world import World
from fabric.strategies.data.context import LoaderContext
from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.loaders import process_dataloader
from fabric.strategies.data.loop_progress import LoopProgress
from fabric.strategies.data.partition import Share


def shared(world: World, loader: Any) -> DeviceLoader:
    assert world.rendezvous is not None
    store = distributed.TCPStore(world.rendezvous.address, world.rendezvous.port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)

    def gather(obj: Any) -> list[Any]:
        votes: list[Any] = [None] * world.size
        distributed.all_gather_object(votes, obj)
        return votes

    context = LoaderContext(
        share=Share(index=world.rank, count=world.size),
        ranks=ranks_by(gather, world.size),
        device=torch.device("cpu"),
        launcher=world.launcher,
        progress=LoopProgress(),
        report=lambda sentence: None,
    )
    loader = process_dataloader(loader, context)
    distributed.destroy_process_group()
    return loader


def two_epochs(world: World, num_workers: int) -> list[list[list[int]]]:
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    loader = shared(world, DataLoader(range(43), 4, shuffle=True, num_workers=num_workers))  # type: ignore[arg-type]
    if world.rank == 1:
        next(iter(loader))
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_with_different_seeds_read_every_sample_once_per_epoch(num_workers: int) -> None:
    ranks = run_world(3, two_epochs, num_workers)
    orders = [in_order([epochs[number] for epochs in ranks]) for number in range(2)]
    assert all(sorted(order) == list(range(43)) for order in orders)
    assert orders[0] != orders[1]


def different_lengths(world: World) -> str:
    try:
        shared(world, DataLoader(range(10 + world.rank), 2))  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_loader_that_differs_raises_on_every_rank() -> None:
    first, second = run_world(2, different_lengths)
    assert first == second
    assert "length 10" in first
    assert "length 11" in first
