"""Every example runs on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO = ("--accelerator", "cuda", "--devices", "2")
WORDS = ("--batch-size", "8", "--context", "32", "--write", "8", "--unseen", "16", "--steps", "4")


@pytest.mark.parametrize(
    ("example", "options", "said"),
    [
        ("digits.py", (*TWO, "--epochs", "5"), "of 359 held-out digits"),
        ("gan.py", (*TWO, "--epochs", "1"), "generator loss"),
        ("byte_gpt.py", (*TWO, *WORDS, "--precision", "bf16-mixed"), "nats per unseen byte"),
        ("tensor_parallel.py", (*TWO, "--batch-size", "8", "--steps", "10", "--tensor", "2"), "nats per byte"),
        ("recommender.py", (*TWO, "--pairs", "2000", "--epochs", "1"), "of 200 pairs"),
        ("finetune_text.py", (*TWO, "--batch-size", "2", "--sentences", "4"), "after: "),
        ("resume.py", ("cuda",), "The losses of all 16 steps equal those of a run that was never stopped."),
    ],
)
def test_an_example_runs_on_two_devices(example: str, options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run([EXAMPLES / example, *options], OMP_NUM_THREADS="1")
    assert said in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
