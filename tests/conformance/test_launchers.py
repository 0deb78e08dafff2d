"""However its ranks come to be, a run gives the numbers of one process, and the same random numbers on every rank."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import template

SCRIPT = """
import sys
from fabric import Fabric

seed, launcher, size = sys.argv[1:]
fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(size), launcher=launcher)
fabric.launch()

from fabric.testing import cases, examine

findings = examine(fabric, [case for case in cases() if case.name in ("sgd", "adamw", "load")], seed=int(seed))
fabric.print([(finding.case, finding.result, finding.message) for finding in findings])
"""


def run(program: Path, launcher: str, size: int, *arguments: str) -> str:
    """Run a script whose last two arguments are the launcher and the number of ranks; what it printed."""
    by_torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    start = by_torchrun if launcher == "external" else [sys.executable]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [*start, str(program), *arguments, launcher, str(size)]
    done = template.run(command, env=environ, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "launcher",
    [
        "fork",
        pytest.param("script", marks=pytest.mark.thorough),
        pytest.param("external", marks=pytest.mark.thorough),
    ],
)
def test_launching_without_a_function_gives_the_numbers_of_one_process(
    launcher: str, size: int, tmp_path: Path
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    program = tmp_path / "train.py"
    program.write_text(SCRIPT)
    output = run(program, launcher, size, str(seed))
    assert eval(output.splitlines()[-1]) == [("sgd", "equal", ""), ("adamw", "equal", ""), ("load", "equal", "")]


RANDOM = """
import random, sys
import torch
from torch.utils.data import DataLoader, Dataset
from fabric import Fabric, seed_everything


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.cat([torch.tensor([float(index)]), torch.rand(1)])


def settings():
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "determinism": torch.get_deterministic_debug_mode(),
        "matmul": torch.backends.mkldnn.matmul.fp32_precision,
        "convolution": torch.backends.cudnn.conv.fp32_precision,
        "benchmark": torch.backends.cudnn.benchmark,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "anomalies": torch.is_anomaly_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
    }


def draw(fabric):
    set_here = settings()
    fabric.setup(torch.nn.Linear(1, 1))  # from the first batch on, ranks draw apart
    loader = fabric.setup_dataloaders(DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=2))
    mine = {
        "torch": torch.rand(2),
        "python": random.random(),
        "order": torch.cat([batch[:, 0] for batch in loader]),
        "workers": torch.cat([batch[:, 1] for batch in loader]),
    }
    return {name: values.tolist() for name, values in fabric.all_gather(mine).items()} | {"settings": set_here}


if __name__ == "__main__":
    launcher, size = sys.argv[1:]
    seed_everything(7)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.mkldnn.enabled = False
    torch.autograd.set_detect_anomaly(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(size), launcher=launcher)
    before = settings()
    if launcher == "script":  # takes no function
        fabric.launch()
        result = draw(fabric)
    else:
        result = fabric.launch(draw)
    if launcher != "script" or fabric.global_rank == 0:
        print({**result, "settings": result["settings"] == before or (result["settings"], before)})
"""


@pytest.mark.slow
@pytest.mark.parametrize("others", [["forkserver"], pytest.param(["spawn", "script"], marks=pytest.mark.thorough)])
def test_random_numbers_and_the_settings_of_torch_are_the_same_in_every_launcher(
    others: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "draw.py"
    program.write_text(RANDOM)
    found = {launcher: eval(run(program, launcher, 2)) for launcher in ("fork", *others)}
    first = found["fork"]
    assert all(drawn == first for drawn in found.values()), found
    assert first["torch"][0] == first["torch"][1]  # one seed for all ranks
    assert first["workers"][0] != first["workers"][1]  # and augmentations of their own
    assert sorted(first["order"][0] + first["order"][1]) == [float(index) for index in range(8)]
    assert first["settings"] is True  # those of the process that launched
