"""`SyncBatchNorm` on a CPU: an error that says what to write."""

from __future__ import annotations

import pytest
import torch
from devices import only_on_cpu
from torch import nn

from fabric import Fabric


def make() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def run(fabric: Fabric) -> bool:
    model = fabric.setup_module(make())
    return bool(model(torch.randn(3, 4)).isfinite().all())


@only_on_cpu("a GPU synchronises")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_3"])
def test_ranks_on_cpus_raise_what_to_write(strategy: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, launcher="forkserver")
    with pytest.raises(Exception, match=r"synchronise GPUs alone, not CPUs. Write `if fabric.device"):
        fabric.launch(run)


def test_one_process_without_a_group_trains() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        assert run(fabric)
