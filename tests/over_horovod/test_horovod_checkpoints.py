"""Checkpoints go from Horovod to DDP and back, on other numbers of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from resumed_runs import load, save

from fabric import Fabric
from fabric.strategies import DDPStrategy, HorovodStrategy, Strategy


def ranks(strategy: Strategy, size: int) -> Fabric:
    return Fabric(accelerator="cpu", strategy=strategy, devices=size)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_from_horovod_under_ddp_and_from_ddp_under_horovod(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    horovod, ddp, paths = HorovodStrategy(timeout_seconds=60), DDPStrategy(), list[str]()
    for strategy, size in ((horovod, 2), (ddp, 1)):
        paths.append(str(tmp_path / f"{type(strategy).__name__}-{size}"))
        ranks(strategy, size).launch(save, paths[-1], seed)
    for strategy, size in ((horovod, 1), (horovod, 4), (ddp, 2)):
        ranks(strategy, size).launch(load, paths, seed)
