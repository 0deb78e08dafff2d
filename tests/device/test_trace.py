"""`fabric.trace` where torch's profiler cannot trace the device itself: the operators of the host are in the file."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from fabric import Fabric


def train(fabric: Fabric, folder: str) -> None:
    model = nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    fabric.trace(range(1, 3), folder)
    for _ in range(3):
        fabric.backward(model(torch.ones(3, 4, device=fabric.device)).sum())
        optimizer.step()


@pytest.mark.slow
def test_steps_on_a_device_are_traced_on_every_rank(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp", sanitize=False, launcher="forkserver")
    fabric.launch(train, str(tmp_path))
    assert (tmp_path / "trace-1-2.json.gz").exists()
    ranks = json.loads((tmp_path / "trace-1-2.summary.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(0 < rank["compute_seconds"] <= rank["seconds"] for rank in ranks)
