"""Modules around models that were set up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import AdamW

from fabric import Fabric, read_checkpoint


def save_around(fabric: Fabric, path: str) -> None:
    """Save, and load, a module that holds two models which were set up."""
    models = []
    for _ in range(2):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model, optimizer = fabric.setup(net, AdamW(net.parameters()))
        fabric.backward(model(torch.ones(2, 4)).sum(), model=model)
        optimizer.step()
        models.append(model)
    around = nn.ModuleDict({"first": models[0], "second": models[1]})
    fabric.save(path, {"model": around})
    wholes = [fabric.state_dict(model, all_ranks=True) for model in models]
    expected = {f"{name}.{key}": value for name, of in zip(around, wholes, strict=True) for key, value in of.items()}
    saved = read_checkpoint(path)["model"]
    torch.testing.assert_close(saved, expected, rtol=0.0, atol=0.0)
    for each, value in saved.items():
        saved[each] = value + 1
    fabric.save(path + "-other", {"model": saved})
    fabric.load(path + "-other", {"model": around})
    torch.testing.assert_close(fabric.state_dict(around, all_ranks=True), saved, rtol=0.0, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3", "ddp_fully_sharded"])
def test_a_module_around_models_that_were_set_up_is_saved_and_loaded_whole(strategy: str, tmp_path: Path) -> None:
    Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy).launch(save_around, str(tmp_path / "saved"))
