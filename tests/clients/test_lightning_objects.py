"""Lightning's own objects, and pydantic, with `fabric.lightning`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import lightning
import lightning.pytorch.loggers
import pydantic
import torch
from fabric.lightning import Fabric
from fabric.lightning.accelerators import Accelerator, CPUAccelerator
from fabric.lightning.connector import _PLUGIN_INPUT, _PRECISION_INPUT
from fabric.lightning.loggers import CSVLogger, Logger
from fabric.lightning.strategies import SingleDeviceStrategy, Strategy


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    accelerator: str | Accelerator = "auto"
    strategy: str | Strategy = "auto"
    devices: list[int] | str | int = 1
    precision: _PRECISION_INPUT | None = None
    plugins: _PLUGIN_INPUT | list[_PLUGIN_INPUT] | None = None
    loggers: Logger | list[Logger] | None = None


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch).mean()
        self.log("train", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


theirs = lightning.pytorch.loggers.CSVLogger("theirs", name=None)
settings = Settings(
    accelerator=CPUAccelerator(),
    strategy=SingleDeviceStrategy(),
    precision="bf16-mixed",
    loggers=[CSVLogger("ours", name=None), theirs],
)
fabric = Fabric(**dict(settings))
fabric.launch()
module = Module()
model, optimizer = fabric.setup(module, module.configure_optimizers())
model.mark_forward_method("training_step")
loss = model.training_step(torch.ones(3, 2), 0)
fabric.backward(loss)
optimizer.step()
theirs.save()
assert module.fabric is fabric
assert open("ours/version_0/metrics.csv").read().split(",")[1].startswith("train")
assert "train" in open("theirs/version_0/metrics.csv").read()
for wrong in ({"strategy": 3}, {"loggers": 3}, {"accelerator": 4}, {"precision": "7"}):
    try:
        Settings(**wrong)
    except pydantic.ValidationError:
        continue
    raise AssertionError(wrong)
print("done")
"""


@pytest.mark.slow
def test_pydantic_checks_classes_and_a_lightning_module_logs_through_its_fabric(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "done"
