"""Weights that are not stored row by row train as in one process, under every strategy: `channels_last`, transposed
weights, and views of a larger tensor."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from worlds import launch_each

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy, Strategy

DATA = torch.randn(3, 8, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 2, 3)).to(memory_format=torch.channels_last)


def transposed() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 6))
    model[1].weight = nn.Parameter((torch.randn(256, 6) * 0.05).t())
    return model


def view_of_a_larger_tensor() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 6))
    model[1].weight = nn.Parameter((torch.randn(6, 512) * 0.05)[:, ::2])
    return model


MODELS = {made.__name__: made for made in (channels_last, transposed, view_of_a_larger_tensor)}


def shard(model: nn.Module, mesh: Any) -> None:
    fully_shard(model, mesh=mesh["shard"])


def train(fabric: Fabric) -> dict[str, dict[str, Tensor]]:
    """The trained weights of each model."""
    trained = {}
    for name, made in MODELS.items():
        torch.manual_seed(0)
        plain = made()
        # In one process torch's fused Adam (2.13) steps a view of a larger tensor wrongly.
        adam = torch.optim.Adam(plain.parameters(), lr=0.01, foreach=False)
        model, optimizer = fabric.setup(plain, adam)
        for batch in DATA:
            fabric.backward(model(fabric.to_device(batch[fabric.global_rank :: fabric.world_size])).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        trained[name] = fabric.state_dict(model)
    return trained


STRATEGIES: dict[str, str | Strategy] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": "hsdp",
    "model_parallel": ModelParallelStrategy(parallelize_fn=shard, shard=2),
    "deepspeed_stage_1": "deepspeed_stage_1",
    "deepspeed_stage_3": "deepspeed_stage_3",
    "ddp_sharded": "ddp_sharded",
    "ddp_fully_sharded": "ddp_fully_sharded",
}


@functools.cache
def trained_by_ranks() -> dict[str, dict[str, dict[str, Tensor]]]:
    return dict(zip(STRATEGIES, launch_each(2, train, [(each,) for each in STRATEGIES.values()]), strict=True))


@functools.cache
def trained_alone() -> dict[str, dict[str, Tensor]]:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        return fabric.launch(train)


@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_that_are_not_contiguous_train_as_in_one_process(name: str) -> None:
    ranks, alone = trained_by_ranks()[name], trained_alone()
    assert ranks.keys() == alone.keys()
    for model, weights in alone.items():
        torch.testing.assert_close(ranks[model], weights, rtol=1e-4, atol=1e-5)
