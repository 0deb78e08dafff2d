"""Each sharded strategy twice: by a fabric, and its backend used directly, in the words of the backend's own manual.

`PAIRS[name]` has the strategy, and a function that makes the step of the backend within ranks that exist already.
Shapes: B samples, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FairScaleFSDPStrategy,
    FairScaleShardedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)

Step = Callable[[], object]
Loss = Callable[[Any], Tensor]


class Block(nn.Module):
    """An MLP, added to what comes in."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_bd: Tensor) -> Tensor:
        return x_bd + self.down(nn.functional.gelu(self.up(x_bd)))


@dataclass(frozen=True)
class Size:
    """How large the model is, and its batches on each rank."""

    dim: int = 256
    num_blocks: int = 8
    batch_size: int = 32

    def make(self) -> tuple[nn.Sequential, SGD]:
        """The same on every rank."""
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(self.dim) for _ in range(self.num_blocks)))
        return model, SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def loss(self) -> Loss:
        """Of a model's outputs for one batch, always the same."""
        x_bd = torch.randn(self.batch_size, self.dim, generator=torch.Generator().manual_seed(1))
        return lambda model: model(x_bd).square().mean()


def ours(fabric: Fabric, size: Size) -> Step:
    """The loop of a fabric, under whichever strategy."""
    model, optimizer = fabric.setup(*size.make())
    loss_of = size.loss()

    def step() -> None:
        fabric.backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plain_step(model: Any, optimizer: Any, loss_of: Loss) -> Step:
    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(reshard_root: bool | None = None, **degrees: int) -> Callable[[Fabric, Size], Step]:
    """`fully_shard` of each block and of the root, over a mesh of such degrees.

    torch keeps the root gathered from forward to backward; the strategies reshard it, as `reshard_root=True` does.
    """

    def make(fabric: Fabric, size: Size) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, _ = size.make()
        mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard_root)
        return _plain_step(model, SGD(model.parameters(), lr=1e-3, momentum=0.9), size.loss())

    return make


def zero_redundancy(fabric: Fabric, size: Size) -> Step:
    """torch's ZeroRedundancyOptimizer beside DistributedDataParallel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, _ = size.make()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3, momentum=0.9)
    return _plain_step(nn.parallel.DistributedDataParallel(model), optimizer, size.loss())


def in_columns_and_rows(model: Any, mesh: Any) -> None:
    """Tensor parallelism: each block's first layer by columns, its second by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel(fabric: Fabric, size: Size) -> Step:
    """The same plan by hand."""
    from torch.distributed.device_mesh import init_device_mesh

    model, _ = size.make()
    in_columns_and_rows(model, init_device_mesh("cpu", (fabric.world_size,), mesh_dim_names=("tensor",)))
    return _plain_step(model, SGD(model.parameters(), lr=1e-3, momentum=0.9), size.loss())


def deepspeed_engine(stage: int, **offload: Any) -> Callable[[Fabric, Size], Step]:
    """`deepspeed.initialize`, `engine.backward` and `engine.step`."""

    def make(fabric: Fabric, size: Size) -> Step:
        from fabric.strategies.deepspeed.library import with_environment

        model, optimizer = size.make()
        config = {
            "train_micro_batch_size_per_gpu": size.batch_size,
            "zero_optimization": {"stage": stage, **offload},
            "zero_force_ds_cpu_optimizer": False,  # as the strategy has it: the user's own optimizer steps
            "zero_allow_untested_optimizer": True,
        }
        with with_environment(fabric._connected.runtime.world, "cpu") as deepspeed:
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        loss_of = size.loss()

        def step() -> None:
            engine.backward(loss_of(engine))
            engine.step()

        return step

    return make


def oss(fabric: Fabric, size: Size) -> Step:
    """FairScale's OSS and ShardedDataParallel. Without reduce buffers: with them it trains wrongly."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    model, _ = size.make()
    optimizer = OSS(model.parameters(), optim=SGD, lr=1e-3, momentum=0.9)
    return _plain_step(ShardedDataParallel(model, optimizer, reduce_buffer_size=0), optimizer, size.loss())


def fairscale_fsdp(fabric: Fabric, size: Size) -> Step:
    """FairScale's FullyShardedDataParallel, parameter by parameter, as the strategy has it; on the CPU by our patch."""
    from fabric.strategies.fairscale.fsdp_wrappers import fully_sharded_on_cpu

    wrap = fully_sharded_on_cpu()
    model, _ = size.make()
    blocks = [wrap(block, flatten_parameters=False, compute_device=torch.device("cpu")) for block in model]
    whole = wrap(nn.Sequential(*blocks), flatten_parameters=False, compute_device=torch.device("cpu"))
    return _plain_step(whole, SGD(whole.parameters(), lr=1e-3, momentum=0.9), size.loss())


PAIRS: dict[str, tuple[Strategy, Callable[[Fabric, Size], Step]]] = {
    "ddp, shard_optimizer": (DDPStrategy(shard_optimizer=True), zero_redundancy),
    "fsdp": (FSDPStrategy(auto_wrap_policy=Block), fsdp2(shard=2)),
    "hsdp": (FSDPStrategy(auto_wrap_policy=Block, device_mesh=(2, 1)), fsdp2(replicate=2, shard=1)),
    "model_parallel, tensor=2": (ModelParallelStrategy(parallelize_fn=in_columns_and_rows, tensor=2), tensor_parallel),
    "deepspeed_stage_1": (DeepSpeedStrategy(stage=1), deepspeed_engine(1)),
    "deepspeed_stage_2": (DeepSpeedStrategy(stage=2), deepspeed_engine(2)),
    "deepspeed_stage_3": (DeepSpeedStrategy(stage=3), deepspeed_engine(3)),
    **{
        f"deepspeed_stage_{stage}_offload": (
            DeepSpeedStrategy(stage=stage, offload_optimizer=True),
            deepspeed_engine(stage, offload_optimizer={"device": "cpu"}),
        )
        for stage in (1, 2, 3)
    },
    "ddp_sharded": (FairScaleShardedStrategy(), oss),
    "ddp_fully_sharded": (FairScaleFSDPStrategy(wrap=Block), fairscale_fsdp),
}

FLOORS = {
    "fsdp": fsdp2(shard=2, reshard_root=True),
    "hsdp": fsdp2(replicate=2, shard=1, reshard_root=True),
}
"""The backend used directly for the work that the strategy gives it, where torch's default does less."""
