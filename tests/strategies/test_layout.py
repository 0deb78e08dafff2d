"""What each strategy says about how its models lie over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import nn

from fabric.strategies import ModelParallelStrategy
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import REPLICAS, Layout
from fabric.strategies.strategy_registry import make_strategy


def unchanged(model: nn.Module, mesh: object) -> None:
    pass


LAYOUTS: Mapping[str, tuple[str, str, str, bool]] = {
    "ddp": ("replicas", "replicas", "replicas", False),
    "fsdp": ("shards", "shards", "shards", True),
    "hsdp": ("shards", "shards", "shards", True),
    "manual": ("any", "shards", "shards", False),
    "ddp_sharded": ("replicas", "shards", "shards", False),
    "ddp_fully_sharded": ("shards", "shards", "shards", True),
    "deepspeed_stage_1": ("replicas", "shards", "shards", False),
    "deepspeed_stage_2": ("replicas", "shards", "shards", False),
    "deepspeed_stage_3": ("shards", "shards", "shards", True),
}
"""Of weights, gradients and optimizer states; and whether forward communicates."""


def told(layout: Layout) -> tuple[str, str, str, bool]:
    return layout.weights, layout.gradients, layout.optimizer_states, layout.forward_communicates


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_strategy_says_what_each_rank_holds(name: str) -> None:
    strategy = make_strategy(name)
    assert isinstance(strategy, ProcessGroupStrategy)
    assert told(strategy.layout({"shard": 2})) == LAYOUTS[name]


@pytest.mark.parametrize("shard", [1, 2])
def test_under_model_parallel_a_forward_communicates_if_it_gathers_shards(shard: int) -> None:
    strategy = ModelParallelStrategy(parallelize_fn=unchanged, shard=shard)
    assert strategy.layout({"shard": shard}).forward_communicates == (shard > 1)


def test_without_a_word_models_are_replicas() -> None:
    assert told(REPLICAS) == ("replicas", "replicas", "replicas", False)
