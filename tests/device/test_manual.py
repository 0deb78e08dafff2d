"""`manual` moves nothing by itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fabric import Fabric
from fabric.strategies import ManualContext, ManualStrategy


def leave_all(module: nn.Module, context: ManualContext) -> nn.Module:
    return module


def offload(module: nn.Module, context: ManualContext) -> nn.Module:
    fully_shard(module, mesh=context.mesh, offload_policy=CPUOffloadPolicy())
    return module


def launched(parallelize: object) -> Fabric:
    fabric = Fabric(accelerator="cuda", devices=1, strategy=ManualStrategy(parallelize=parallelize))  # type: ignore[arg-type]
    fabric.launch()
    return fabric


def test_a_tensor_may_stay_elsewhere_where_setup_is_told_so() -> None:
    with launched(leave_all) as fabric:
        model = fabric.setup(nn.Linear(2, 2), move_to_device=False)
        assert model(torch.ones(1, 2)).device.type == "cpu"


def test_shards_that_fully_shard_offloads_may_stay_on_the_cpu() -> None:
    with launched(offload) as fabric:
        model = fabric.setup(nn.Linear(2, 2))
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
