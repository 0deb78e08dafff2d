"""The largest batch size under strategies whose forward and backward communicate: ranks run out of memory anywhere."""

from functools import partial
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ManualContext,
    ManualStrategy,
    ModelParallelStrategy,
    Parallelized,
    Strategy,
)
from fabric.strategies.strategy_registry import make_strategy

LIMITS = (29, 11, 40, 23)
"""The samples that fit on each rank."""


class Limited(torch.autograd.Function):
    """The identity, which runs out of memory with more samples than fit on this rank: in forward, or in backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, limit: int, in_backward: bool) -> Tensor:
        context.limit = limit
        if not in_backward and len(x) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        if len(gradient) > context.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient, None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.limit, self.in_backward = 2**20, False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x)).relu()
        out: Tensor = x + self.down(Limited.apply(hidden, self.limit, self.in_backward))  # type: ignore[no-untyped-call]
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block(), Block()), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(nn.functional.dropout(self.blocks(x), 0.1))
        return out


def cut_and_sharded(model: nn.Module, mesh: Any) -> None:
    """Layers cut along the tensor axis, and all of it in shards."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:  # type: ignore[union-attr]
        up = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(block, mesh["tensor"], {"up": up, "down": RowwiseParallel(input_layouts=Replicate())})
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def in_two_ways(module: nn.Module, context: ManualContext) -> Parallelized:
    """Blocks in shards, and the head in DistributedDataParallel."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=context.mesh)
    module.head = DistributedDataParallel(module.head.to(context.device))  # type: ignore[arg-type, operator]
    return Parallelized(module=module)


BUCKETS = {"zero_optimization": {"reduce_bucket_size": 40}}
"""Some of the gradients are reduced before a backward is cut short."""
STRATEGIES: dict[str, tuple[int, Any]] = {
    "ddp": (2, partial(make_strategy, "ddp")),
    "fsdp": (2, partial(make_strategy, "fsdp")),
    "hsdp": (4, partial(FSDPStrategy, device_mesh=(2, 2))),
    "tensor": (4, partial(ModelParallelStrategy, parallelize_fn=cut_and_sharded, shard=2, tensor=2)),
    "manual": (2, partial(ManualStrategy, parallelize=in_two_ways)),
    "ddp_sharded": (2, partial(make_strategy, "ddp_sharded")),
    "deepspeed_stage_1": (2, partial(make_strategy, "deepspeed_stage_1")),
    "deepspeed_stage_2": (2, partial(DeepSpeedStrategy, stage=2, config=BUCKETS)),
}


def train_both(world: World, strategy: Strategy) -> Any:
    """A run that looks for sizes, and one that does not."""
    return train(world, strategy, True), train(world, strategy, False)


def train(world: World, strategy: Strategy, finds: bool) -> Any:
    """Three windows of two micro-batches; sizes are looked for before the first, after gradients of a window that the
    program has discarded, and after the first step."""
    found: list[int] = []
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size, sanitize="always") as fabric:
        fabric.launch()
        fabric.seed_everything(1)
        net = Net()
        model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=0.1))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.rand(48, 4)), batch_size=4, shuffle=True))

        def run(batch_size: int) -> None:
            loss = model(torch.rand(batch_size, 4, device=fabric.device)).mean()
            fabric.all_reduce(loss.detach())
            fabric.backward(loss, weight=batch_size)

        def find() -> None:
            for block, in_backward in [(1, False), (2, True), (0, True)] if finds else ():
                net.blocks[block].limit, net.blocks[block].in_backward = LIMITS[fabric.global_rank], in_backward
                found.append(fabric.find_batch_size(run, start=8))
                net.blocks[block].limit = 2**20

        find()
        if not isinstance(strategy, ManualStrategy):  # where `zero_grad` leaves such gradients
            with fabric.no_backward_sync(model):
                fabric.backward(model(torch.rand(4, 4, device=fabric.device)).mean(), weight=1)
            optimizer.zero_grad()
            find()
        for number, window in enumerate(fabric.accumulate(loader, 2, model)):
            for (batch,) in window:
                fabric.backward(model(batch).square().mean(), weight=len(batch))
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                find()
        return found, {name: each.clone() for name, each in fabric.state_dict(model, all_ranks=True).items()}


THOROUGH = ("ddp", "hsdp", "tensor", "ddp_sharded", "deepspeed_stage_1")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in THOROUGH else ()) for name in STRATEGIES]
)
def test_a_rank_that_runs_out_of_memory_anywhere_leaves_all_as_before(name: str) -> None:
    size, make = STRATEGIES[name]
    for (found, weights), (_, expected) in run_world(size, train_both, make()):
        assert found == [min(LIMITS[:size])] * (6 if name == "manual" else 9)
        for parameter, value in expected.items():
            assert torch.equal(weights[parameter], value), parameter


def step_after_both(world: World, strategy: Strategy) -> Any:
    return step_after(world, strategy, True), step_after(world, strategy, False)


def step_after(world: World, strategy: Strategy, is_cut_short: bool) -> Any:
    """The parameters after a step; `is_cut_short`: whether a backward before it ran out of memory."""
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        torch.manual_seed(1)
        net = Net()
        model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=0.1))
        x = torch.rand(4, 4, device=fabric.device)
        net.blocks[1].in_backward = True
        if is_cut_short:
            net.blocks[1].limit = 0
            with pytest.raises(torch.OutOfMemoryError):
                fabric.backward(model(x).mean())
            net.blocks[1].limit = 2**20
            optimizer.zero_grad()
        torch.manual_seed(2)
        fabric.backward(model(x).mean())
        optimizer.step()
        state = fabric.state_dict(model, all_ranks=True)
        return {name: state[name].tolist() for name, _ in Net().named_parameters()}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_after_a_backward_that_ran_out_of_memory_is_that_of_one_without(stage: int) -> None:
    strategy = DeepSpeedStrategy(stage=stage, config=BUCKETS)
    for cut_short, whole in run_world(2, step_after_both, strategy):
        assert cut_short == whole
