"""Examples have the numbers of one process: `fabric verify` says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import template

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL_GPT = ["--context", "16", "--dim", "16", "--layers", "2", "--unseen", "8", "--batch-size", "4"]
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

STRATEGIES = (
    *("ddp", "fsdp", "hsdp", "ddp_sharded", "ddp_fully_sharded"),
    *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
)
WORDS = {"byte_gpt.py": SMALL_GPT, "digits.py": [], "gan.py": [], "finetune_text.py": ["--batch-size", "2"]}
CASES = [
    *((example, ["--strategy", strategy, *words]) for example, words in WORDS.items() for strategy in STRATEGIES),
    ("tensor_parallel.py", ["--tensor", "2", "--batch-size", "4"]),
    ("recommender.py", ["--pairs", "2000", "--batch-size", "64"]),
]


@pytest.mark.parametrize(("example", "words"), CASES, ids=lambda part: part if isinstance(part, str) else part[1])
def test_an_example_has_the_numbers_of_one_process(example: str, words: list[str], tmp_path: Path) -> None:
    script = [str(EXAMPLES / example), "--accelerator", "cpu", "--devices", "2", *words]
    ended = template.run(
        [sys.executable, "-m", "fabric", "verify", "--steps", "3", *script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "The numbers of one process: " in ended.stdout
