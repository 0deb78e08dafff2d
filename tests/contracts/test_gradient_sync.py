"""What every `GradientSync` holds, whatever the technique: one suite, on two real ranks of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ManualContext,
    ManualStrategy,
    ModelParallelStrategy,
    Parallelized,
    Strategy,
)
from fabric.strategies.checkpoint.tensors import gathered
from fabric.strategies.gradients.sync import GradientSync
from fabric.strategies.strategy_registry import make_strategy

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Two layers that every loss uses, and a count of what forward has seen on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 1)
        generator = torch.Generator().manual_seed(1)  # torch's own is shared by XLA's replicas, which are threads
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.down(self.up(x).tanh()).square().mean()}


def in_shards(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["shard"])


def averaged(module: nn.Module, context: ManualContext) -> Parallelized:
    return Parallelized(module=module.to(context.device), averaged=module)


TECHNIQUES: dict[str, tuple[int, Callable[[], Strategy], str]] = {
    "single_device": (1, partial(make_strategy, "single_device"), "LocalGradientSync"),
    "dp": (1, partial(make_strategy, "dp"), "LocalGradientSync"),
    "ddp": (2, DDPStrategy, "DDPGradientSync"),
    "fsdp": (2, FSDPStrategy, "ShardedGradientSync"),
    "model_parallel": (2, partial(ModelParallelStrategy, parallelize_fn=in_shards, shard=2), "ShardedGradientSync"),
    "manual": (2, partial(ManualStrategy, parallelize=averaged), "ManualGradientSync"),
    "ddp_sharded": (2, partial(make_strategy, "ddp_sharded"), "FairScaleShardedGradientSync"),
    "ddp_fully_sharded": (2, partial(make_strategy, "ddp_fully_sharded"), "FairScaleFSDPGradientSync"),
    "deepspeed_1": (2, partial(DeepSpeedStrategy, stage=1), "Engine"),
    "deepspeed_3": (2, partial(DeepSpeedStrategy, stage=3), "Engine"),
}
"""Ranks, how the strategy is made, and the class that it must make. Those over Horovod and XLA run in environments of
their own (`tests/over_horovod`, `tests/xla`), and a pipeline runs its own schedule (`pipeline/test_schedule.py`)."""
BATCHES = torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(2)).to(ACCELERATOR)
"""`(ranks, micro-batches, samples, features)`."""


def observe(world: World, make: Callable[[], Strategy]) -> dict[str, Any]:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=make(), devices=world.size)
    fabric._connect(world)
    return use(fabric)


def use(fabric: Fabric) -> dict[str, Any]:
    """What a rank sees of its gradient synchronisation, from setup to close."""
    given = Net()
    optimizer = SGD(given.parameters(), lr=0.5)
    model, optimizer = fabric.setup(given, optimizer)
    prepared = fabric._connected.objects.models[model]
    found: dict[str, Any] = {"class": type(prepared.sync), "weights": []}

    def backward(micro_batch: int) -> None:
        found["output"] = model(fabric.to_device(BATCHES[fabric.global_rank, micro_batch]))
        fabric.backward(found["output"]["loss"])

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        whole = gathered(fabric.collective, prepared.state.read_module(model))
        found["weights"].append({name: value.detach().cpu().clone() for name, value in whole.items()})

    backward(0)
    step()
    with suppress(KeyError), prepared.sync.unsynced():
        with prepared.sync.unsynced():
            backward(1)
        backward(2)
        raise KeyError
    finish = prepared.sync.watch()  # before a backward that reaches another model alone
    if finish is not None:
        finish()
    backward(3)
    step()
    found["output"] = type(found["output"]), found["output"]["loss"].requires_grad
    fabric.close()
    found["ours"] = [
        f"{name}.{attribute}"
        for name, part in given.named_modules()
        for attribute, value in vars(part).items()
        if is_ours(value) or (isinstance(value, dict) and any(map(is_ours, value.values())))
    ] + [str(hook) for hook in optimizer._optimizer_step_pre_hooks.values() if is_ours(hook)]
    return found


def is_ours(value: Any) -> bool:
    """Whether an attribute or a hook comes from this package. What `fully_shard` leaves on a module stays."""
    return any((getattr(each, "__module__", None) or "").startswith("fabric.") for each in (type(value), value))


@functools.cache
def seen(name: str) -> list[dict[str, Any]]:
    size, make, _ = TECHNIQUES[name]
    return run_world(size, observe, make)


def plain(size: int) -> list[dict[str, Tensor]]:
    """The weights of one process that has the batches of all ranks."""
    model = Net().to(ACCELERATOR)
    optimizer = SGD(model.parameters(), lr=0.5)
    weights = []
    for window in ([0], [1, 2, 3]):
        for micro_batch in window:
            torch.stack([model(BATCHES[rank, micro_batch])["loss"] for rank in range(size)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: value.detach().cpu().clone() for name, value in model.state_dict().items()})
    return weights


each_technique = pytest.mark.parametrize("name", TECHNIQUES)


@each_technique
def test_every_technique_has_a_gradient_sync_of_its_own(name: str) -> None:
    for found in seen(name):
        assert issubclass(found["class"], GradientSync)
        assert found["class"].__name__ == TECHNIQUES[name][2]


@each_technique
def test_forward_returns_the_output_of_the_model(name: str) -> None:
    for found in seen(name):
        assert found["output"] == (dict, True)


@each_technique
def test_unsynchronised_gradients_are_averaged_by_the_next_synchronised_backward_however_contexts_were_nested_and_left(
    name: str,
) -> None:
    torch.testing.assert_close(seen(name)[0]["weights"], plain(TECHNIQUES[name][0]), rtol=1e-5, atol=1e-6)


@each_technique
def test_after_release_nothing_of_ours_is_on_the_module_or_the_optimizer(name: str) -> None:
    for found in seen(name):
        assert not found["ours"]
