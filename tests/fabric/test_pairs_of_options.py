"""Options of strategies with what a loop may call: each pair trains as one process does, or is refused by one sentence.

Pairs of words that are refused before anything starts are in `configure/test_resolve.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FairScaleFSDPStrategy,
    FairScaleShardedStrategy,
    FSDPStrategy,
    ManualStrategy,
    ModelParallelStrategy,
    Strategy,
)

Step = Callable[[Fabric, nn.Module, list[Optimizer], int], None]
PARTS = (nn.Sequential,)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.second(self.first(x)))
        return output


def loss_of(fabric: Fabric, model: nn.Module, number: int, *, is_sum: bool = False) -> Tensor:
    """Of this rank's share of four samples."""
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(4, 4, generator=draw), torch.randn(4, 3, generator=draw)
    own = slice(fabric.global_rank, None, fabric.world_size)
    losses = (model(fabric.to_device(x[own])) - fabric.to_device(y[own])).square()
    return losses.sum() if is_sum else losses.mean()


def accumulate(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    for window in fabric.accumulate([0, 1], 2):
        for number in window:
            fabric.backward(loss_of(fabric, model, 2 * step + number) / 2)


def no_backward_sync(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    with fabric.no_backward_sync(model):
        fabric.backward(loss_of(fabric, model, step))
    fabric.backward(loss_of(fabric, model, step + 9))


def weight(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    fabric.backward(loss_of(fabric, model, step, is_sum=True), weight=4 / fabric.world_size)


def two_backwards(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    fabric.backward(loss_of(fabric, model, step), retain_graph=True)
    fabric.backward(loss_of(fabric, model, step + 9))


def clip(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    fabric.backward(loss_of(fabric, model, step))
    for optimizer in optimizers:
        fabric.clip_gradients(model, optimizer, max_norm=0.1)


def guard(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    if step == 0:
        fabric.guard_gradients("skip")
    accumulate(fabric, model, optimizers, step)


def ema(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    average = fabric.ema(model, decay=0.5)
    average.update()
    with average.applied():
        fabric.backward(loss_of(fabric, model, step))


def compiled(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    fabric.backward(loss_of(fabric, torch.compile(model, backend="eager"), step))


def gradient(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    loss = loss_of(fabric, model, step)
    fabric.backward(loss, gradient=torch.full_like(loss, 0.5))


def inputs(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    fabric.backward(loss_of(fabric, model, step), inputs=list(model.parameters()))


def create_graph(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    fabric.backward(loss_of(fabric, model, step), create_graph=True)


def not_quite(fabric: Fabric, model: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    """Arguments that ask for nothing."""
    fabric.backward(loss_of(fabric, model, step), create_graph=False, inputs=None)


STEPS: tuple[Step, ...] = (
    *(accumulate, no_backward_sync, weight, two_backwards, clip, guard, ema, compiled, gradient, inputs, create_graph),
    not_quite,
)


def all_reduce(state: object, bucket: Any) -> Any:
    mean = bucket.buffer() / torch.distributed.get_world_size()
    work = torch.distributed.all_reduce(mean, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def shard(model: nn.Module, mesh: Any) -> None:
    fully_shard(model, mesh=mesh["shard"])


def shard_over_all(model: nn.Module, context: Any) -> nn.Module:
    return fully_shard(model, mesh=context.mesh)


STATIC = dict.fromkeys(
    ("accumulate", "no_backward_sync", "guard"),
    "torch ends in an INTERNAL ASSERT if that is within `no_backward_sync` or a window of `accumulate`",
)
GRAPH = {"create_graph": "DistributedDataParallel averages gradients in place, which those with a graph do not allow"}
INPUTS = {"inputs": "of a model in shards: its gradients reach other tensors than `model.parameters()` gives"}
SMALL = {
    "compiled": "cuts its graphs by the buckets of gradients, the first of 1048576 bytes, and takes no smaller ones"
}
UNCOMPILED = {"compiled": "FairScale gathers parameters in code that the compiler cannot trace"}
PAIRS: dict[str, tuple[Strategy, Mapping[str, str]]] = {
    "static_graph": (DDPStrategy(static_graph=True, activation_checkpointing_policy=PARTS), STATIC | GRAPH),
    "static_graph, find_unused_parameters": (
        DDPStrategy(static_graph=True, find_unused_parameters=True),
        STATIC | GRAPH,
    ),
    "gradient_as_bucket_view, small buckets": (
        DDPStrategy(gradient_as_bucket_view=True, find_unused_parameters=True, bucket_bytes=64),
        GRAPH | SMALL,
    ),
    "comm_hook, gradient_as_bucket_view": (DDPStrategy(comm_hook=all_reduce, gradient_as_bucket_view=True), GRAPH),
    "comm_hook, checkpointing": (DDPStrategy(comm_hook=all_reduce, activation_checkpointing_policy=PARTS), GRAPH),
    "shard_optimizer, gradient_as_bucket_view": (
        DDPStrategy(shard_optimizer=True, gradient_as_bucket_view=True, find_unused_parameters=True),
        GRAPH,
    ),
    "fsdp, not resharded, checkpointing": (
        FSDPStrategy(auto_wrap_policy=PARTS, reshard_after_forward=False, activation_checkpointing_policy=PARTS),
        INPUTS,
    ),
    "fsdp, replicas": (FSDPStrategy(device_mesh=(2, 1), reshard_after_forward=None), INPUTS),
    "model_parallel, roots not resharded": (
        ModelParallelStrategy(parallelize_fn=shard, shard=2, reshard_roots=False),
        INPUTS,
    ),
    "manual, fully_shard": (ManualStrategy(parallelize=shard_over_all), INPUTS),
    "ddp_sharded, checkpointing": (FairScaleShardedStrategy(activation_checkpointing_policy=PARTS), {}),
    "ddp_fully_sharded, checkpointing": (
        FairScaleFSDPStrategy(wrap=PARTS, reshard_after_forward=False, activation_checkpointing_policy=PARTS),
        UNCOMPILED,
    ),
    "deepspeed_stage_1, offload": (DeepSpeedStrategy(stage=1, offload_optimizer=True), {}),
    "deepspeed_stage_3, checkpointing": (
        DeepSpeedStrategy(stage=3, activation_checkpointing_policy=PARTS, offload_parameters=True),
        {},
    ),
}
"""Options of a strategy, and what is refused with them; all other pairs train as one process does."""


def train(fabric: Fabric, step_of: Step) -> dict[str, Tensor] | str:
    """The weights after three steps, or the error."""
    torch.manual_seed(0)
    net = Net()
    is_adam = step_of in (clip, weight)
    made: Optimizer = AdamW(net.parameters(), lr=0.01) if is_adam else SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(net, made)
    try:
        for step in range(3):
            step_of(fabric, model, [optimizer], step)
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return fabric.state_dict(model, all_ranks=True)


def train_all(world: World, name: str) -> dict[str, dict[str, Tensor] | str]:
    found = {}
    for step_of in STEPS:
        with Fabric(accelerator=ACCELERATOR, strategy=PAIRS[name][0], launcher="external") as fabric:
            fabric.launch()
            found[step_of.__name__] = train(fabric, step_of)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_each_pair_trains_as_one_process_does_or_is_refused(name: str) -> None:
    found, other = run_world(2, train_all, name)
    refused = PAIRS[name][1]
    for step_of in STEPS:
        step, weights = step_of.__name__, found[step_of.__name__]
        if step in refused:
            assert refused[step] in weights, step
            assert isinstance(other[step], str), step
        else:
            with Fabric(accelerator=ACCELERATOR, devices=1, strategy="single_device") as fabric:
                torch.testing.assert_close(
                    weights, train(fabric, step_of), rtol=1e-4, atol=1e-5, msg=f"{step}: {weights}"
                )
