"""The scripts of docs/coming-from as they were before: they run with Lightning Fabric, Accelerate and torchrun.

They end with the accuracy, or the line, that `tests/test_examples.py` sees of the scripts after them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/coming-from"
START = {
    "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--mixed_precision", "bf16"],
    "lightning": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def run(script: str, words: list[str], folder: Path) -> str:
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *words, "train.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script_of(page: str, fence: str) -> str:
    """The first block with this fence: `py` is not run by the tests of the pages, `python` is."""
    return re.findall(rf"```{fence}\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)[0]


def on_cpu(script: str) -> str:
    """The script of torchrun is for GPUs."""
    for cuda, cpu in (
        ('"nccl"', '"gloo"'), ("    torch.cuda.set_device(local_rank)\n", ""), (", device_ids=[local_rank]", ""),
        ('autocast("cuda"', 'autocast("cpu"'), (".to(local_rank)", ""),
    ):  # fmt: skip
        assert cuda in script
        script = script.replace(cuda, cpu)
    return script


@pytest.mark.parametrize("page", ["accelerate", "torchrun"])
def test_a_script_learns_before_it_is_changed(page: str, tmp_path: Path) -> None:
    before = script_of(page, "py")
    output = run(on_cpu(before) if page == "torchrun" else before, START[page], tmp_path)
    epochs = re.findall(r"epoch (\d): ([\d.]+)% of 200", output)
    assert [number for number, _ in epochs] == list("01234"), output
    assert float(epochs[-1][1]) > 80


def test_the_script_of_lightning_runs_with_the_imports_of_before(tmp_path: Path) -> None:
    after = script_of("lightning", "python")
    before = after.replace("from fabric.lightning", "from lightning.fabric")
    assert before.count("from lightning.fabric") == 3
    assert run(before, START["lightning"], tmp_path).splitlines()[-1] == "Sequential 32-true"
