"""The largest batch size on devices of which one has less memory: agreed, and the memory is given back."""

from typing import Any

import pretended_cuda
import pytest
import torch
from torch import nn
from torch.optim import SGD
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World

WIDTH = 2**16
"""A sample has 256 KiB."""


def find(world: World, strategy: str) -> Any:
    with Fabric(accelerator="cuda", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        pretended_cuda.limit_memory(fabric.device.index, (128 - 64 * fabric.global_rank) * 2**20)
        net = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
        before = torch.cuda.memory_allocated()

        def run(batch_size: int) -> None:
            fabric.backward(model(torch.ones(batch_size, WIDTH, 1, device=fabric.device)).mean())

        found = fabric.find_batch_size(run, start=4)
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.memory_reserved() < 8 * 2**20
        run(found)
        optimizer.step()
        return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_device_with_the_least_memory_decides_and_all_memory_is_given_back(strategy: str) -> None:
    one, other = run_world(2, find, strategy)
    assert one == other
    assert 30 <= one <= 128
