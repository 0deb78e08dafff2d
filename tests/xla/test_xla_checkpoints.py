"""Checkpoints go from XLA to DDP and back, on other numbers of ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from cpu_replicas import launch_replicas
from resumed_runs import load, save

from fabric import Fabric
from fabric.strategies.xla.replicas import XLAStrategy

SIZE = int(os.environ["CPU_NUM_DEVICES"])


def over_ddp(function: Callable[..., None], *args: object) -> None:
    Fabric(accelerator="cpu", strategy="ddp", devices=2, launcher="forkserver").launch(function, *args)


def over_one_device(function: Callable[..., None], *args: object) -> None:
    Fabric(accelerator="xla", strategy="single_xla", devices=1).launch(function, *args)


def over_replicas(function: Callable[..., None], *args: object) -> None:
    launch_replicas(Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=SIZE), function, *args)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_from_xla_under_ddp_and_from_ddp_under_xla(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    paths = []
    for launch in (over_ddp, over_one_device, over_replicas):
        paths.append(str(tmp_path / launch.__name__))
        launch(save, paths[-1], seed)
    assert len(list(Path(paths[-1]).glob("*.bin"))) == SIZE, "not every replica has written a part"
    for launch in (over_ddp, over_one_device, over_replicas):
        launch(load, paths, seed)
