"""Torch's errors where a parameter in shards meets a whole tensor: each has a note that says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devices import ACCELERATOR
from processes import run
from torch import nn
from torch.nn.utils.prune import l1_unstructured

from fabric import Fabric, WorkerError
from fabric.checks.shard_errors import explain_shards

PROGRAM = """
import sys

import torch
from torch import nn

from fabric import Fabric

with Fabric(accelerator="cpu", devices=2, strategy="fsdp") as fabric:
    fabric.launch()
    model = fabric.setup(nn.Linear(8, 4))
    model(torch.ones(2, 8))
    with torch.no_grad():
        model.weight.mul_(torch.ones(4, 8))
"""


def change(fabric: Fabric) -> None:
    """Change a weight in several ways, each of which raises; the last error ends the rank."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 8, device=fabric.device)).sum())
    optimizer.step()
    weight, whole = model[0].weight, torch.ones(4, 8, device=fabric.device)

    for mistake in (
        lambda: weight.lerp_(whole, 0.5),
        lambda: weight.__setitem__(whole == 0, 0),
        lambda: whole @ weight.t(),
        lambda: weight.mul_(whole),
    ):
        with pytest.raises((RuntimeError, IndexError)) as raised, torch.no_grad():
            mistake()
        explain_shards(raised.value)
        assert ["gathered" in note for note in raised.value.__notes__] == [True]
    l1_unstructured(model[0], "weight", 0.5)
    model(torch.ones(2, 8, device=fabric.device))


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3", "ddp_fully_sharded"])
def test_an_error_of_a_shard_says_to_gather_it(strategy: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    with pytest.raises(WorkerError, match=r"in l1_unstructured|in apply_mask") as raised:
        fabric.launch(change)
    assert str(raised.value).count("change them within `fabric.gathered(model, write=True)`, and prune before") == 1


def test_a_script_that_fails_within_its_fabric_has_the_note(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    assert "within `fabric.gathered(model, write=True)`" in run([script]).stderr


def refuse(fabric: Fabric) -> None:
    fabric.setup(nn.Linear(8, 4)).weight.data.mul_(torch.ones(3, 8))


def test_the_same_error_of_a_replica_has_no_note() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", launcher="forkserver")
    with pytest.raises(WorkerError, match="The size of tensor a") as raised:
        fabric.launch(refuse)
    assert "fabric.gathered" not in str(raised.value)
