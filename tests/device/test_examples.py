"""Each example runs on two devices as a person runs it, and learns there what it learns on the CPU.

Nothing here compiles by inductor, which has no backend for a pretended device: no example calls `torch.compile`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import template

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = ["--batch-size", "4", "--context", "32", "--write", "10", "--unseen", "16", "--steps", "10", "--below", "5.5"]
DEVICES = ["--accelerator", "cuda", "--devices", "2"]

pytestmark = pytest.mark.slow


def run_example(name: str, *words: str, cwd: Path) -> str:
    """What the example printed."""
    done = template.run(
        [sys.executable, str(EXAMPLES / name), *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


PROGRAMS: dict[str, tuple[str, list[str], str]] = {
    "digits": ("digits.py", ["--epochs", "6"], r"epoch 5: (9[7-9]|100)\.\d+% of 359 held-out digits"),
    "gan": ("gan.py", ["--epochs", "1"], r"generator loss [\d.]+  discriminator loss [\d.]+\n"),
    "gpt": ("byte_gpt.py", GPT, r"[\d.]+ nats per unseen byte"),
    "gpt in shards": ("byte_gpt.py", [*GPT, "--strategy", "fsdp", "--precision", "bf16-mixed"], "nats per unseen byte"),
    "tensor parallel": ("tensor_parallel.py", ["--steps", "10", "--tensor", "2"], r"step \d+: [\d.]+ nats per byte"),
    "recommender": ("recommender.py", ["--pairs", "2000", "--epochs", "1"], r"epoch 0: .*of 200 pairs"),
    "rollout": ("rollout.py", ["--steps", "10"], r"step 10: mean reward [\d.]+"),
    "encoder": ("finetune_text.py", ["--batch-size", "2"], r"after: [\d.]+ nats over \d+ words"),
}
"""The example, its words, and what it says at the end."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_runs_on_two_devices(program: str, tmp_path: Path) -> None:
    name, words, said = PROGRAMS[program]
    output = run_example(name, *DEVICES, *words, cwd=tmp_path)
    assert re.search(said, output), output


def test_a_run_killed_in_mid_epoch_resumes_on_devices_with_the_losses_of_an_uninterrupted_run(tmp_path: Path) -> None:
    output = run_example("resume.py", "--accelerator", "cuda", cwd=tmp_path)
    assert "The losses of all 16 steps equal those of a run that was never stopped." in output


def test_every_example_but_the_plain_loop_is_among_these() -> None:
    names = {name for name, _, _ in PROGRAMS.values()} | {"resume.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == names | {"digits_torch.py"}
