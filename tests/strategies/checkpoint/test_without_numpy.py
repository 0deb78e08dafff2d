"""torch installs without NumPy: launching, saving, resuming and exporting need none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

sys.modules["numpy"] = None  # as if it were not installed
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
from torch import nn

from fabric import Fabric, read_checkpoint


def train(fabric):
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=2, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0, "complex": torch.ones(2) * 1j}
    for batch in loader:
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    fabric.save("last.ckpt", state)
    before = float(fabric.all_reduce(model(torch.ones(1, 8)).detach().sum()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    fabric.load("last.ckpt", state)
    assert float(fabric.all_reduce(model(torch.ones(1, 8)).detach().sum())) == before



if __name__ == "__main__":
    for start in ("forkserver", "spawn"):
        with Fabric(accelerator="cpu", devices=2, strategy="ddp", launcher=start) as fabric:
            fabric.launch(train)
    assert read_checkpoint("last.ckpt")["model"]["weight"].shape == (1, 8)
    assert read_checkpoint("last.ckpt")["complex"].tolist() == [1j, 1j]
    print("complete")
"""


@pytest.mark.slow
@pytest.mark.thorough  # makes an environment of its own
def test_a_program_launches_saves_and_resumes_where_numpy_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("complete\n")
