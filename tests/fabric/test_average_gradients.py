"""Gradients that a loop computes in its own way, averaged over the ranks before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World

SAMPLES = torch.randn(2, 3, 4, 3, generator=torch.Generator().manual_seed(1))
"""`(ranks, steps, samples, features)`. Rank 1 has one sample less."""


def parts() -> tuple[nn.Sequential, SGD]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1), nn.Linear(1, 1))
    model[3].weight.requires_grad_(False)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in ("average_gradients", "weight", "ddp"):
        fabric = Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=world.size)
        fabric._connect(world)
        model, optimizer = parts()
        if way == "ddp":
            model, optimizer = fabric.setup(model, optimizer)
        for step in range(3):
            samples = SAMPLES[world.rank, step, : 4 - world.rank]
            loss = model(samples).square().sum()
            if way == "ddp":
                fabric.backward(loss)
                with pytest.raises(ValueError, match="of a `Sequential` that was set up"):
                    fabric.average_gradients(model.parameters())
            else:
                loss.backward()
                fabric.average_gradients(model.parameters(), weight=len(samples) if way == "weight" else None)
            optimizer.step()
            optimizer.zero_grad()
        found[way] = {name: value.detach().clone() for name, value in model.state_dict().items()}
        fabric.close()
    return found


def train_alone() -> dict[str, Tensor]:
    model, optimizer = parts()
    for step in range(3):
        samples = torch.cat([SAMPLES[rank, step, : 4 - rank] for rank in range(2)])
        model(samples).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.slow
def test_averages_equal_those_of_ddp_and_weighted_averages_those_of_one_process() -> None:
    for found in run_world(2, train):
        torch.testing.assert_close(found["average_gradients"], found["ddp"])
        torch.testing.assert_close(found["weight"], train_alone())
