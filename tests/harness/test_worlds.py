"""The helper that the other tests start ranks with."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile
from worlds import run_world

from fabric.launchers.rendezvous.join import join
from fabric.launchers.world import World


def gather(world: World, offset: int) -> list[float]:
    for _ in range(2):
        store = join(world, 30, print)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        tensor = torch.tensor([float(world.rank + offset)])
        out = [torch.zeros(1) for _ in range(world.size)]
        dist.all_gather(out, tensor)
        dist.destroy_process_group()
    return [x.item() for x in out]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_run_world_returns_the_result_of_every_rank(size: int) -> None:
    assert run_world(size, gather, 10) == [[10.0 + rank for rank in range(size)]] * size


def kernels_of_a_step(world: World) -> str | None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.ones(2)
    with profile() as profiled:
        optimizer.step()
    operators = " ".join(event.key for event in profiled.key_averages())
    return next((kind for kind in ("fused", "foreach") if f"aten::_{kind}_" in operators), None)


def test_ranks_step_with_the_kernels_that_were_chosen(optimizers: str | None) -> None:
    assert run_world(1, kernels_of_a_step) == [optimizers]
