"""`fabric verify` over replicas of XLA: a right program is equal to one device, and a wrong factor is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SIZE = int(os.environ["CPU_NUM_DEVICES"])

# Replicas are threads here, with one generator: the model is not drawn.
PROGRAM = """
import sys

import cpu_replicas
import torch
from torch import nn

from fabric import Fabric
from fabric.strategies.xla.replicas import XLAStrategy


def train(fabric, factor):
    cpu_replicas.mend()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).sin().view_as(parameter) / 3)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for batch in fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 4)):
        fabric.backward(model(batch).square().mean() * fabric.world_size**factor)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    fabric = Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=int(sys.argv[1]))
    fabric.launch(train, int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("factor", "options", "words"),
    [
        (0, (), f"The numbers of one process: XLAStrategy on {SIZE} ranks is equal in 3 steps"),
        # The run with the sanitizer, which is refused and repeated without, is in the case above.
        (
            1,
            ("--sanitize", "False"),
            f"`0.weight` under XLAStrategy on {SIZE} ranks is {SIZE} times (the number of ranks) that of one process",
        ),
    ],
    ids=["right", "wrong"],
)
def test_a_program_over_replicas_is_compared_with_one_device(
    factor: int, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    # With a tolerance there is no second reference.
    command = (sys.executable, "-m", "fabric", "verify", "--steps", "3", "--tolerance", "1e-5")
    ended = subprocess.run(
        [*command, *options, "train.py", str(SIZE), str(factor)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == factor, ended.stderr
    assert words in " ".join(ended.stdout.split())
