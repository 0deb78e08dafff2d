"""The pictures of terminals in the pages show what the programs of the tutorial print today."""

import html
import os
import re
import sys
from pathlib import Path

import pytest
import template
from terminal import FOLDER, PICTURES, ROOT, block, seen

pytestmark = pytest.mark.slow

SAID = {
    "progress": ("64/64", "samples/s", "epoch 0: loss 0.4725", "epoch 2: loss 0.1922"),
    "sanitizer": (
        "of parameter group 0 of `SGD` on rank 1 differs from that on rank 0 (0.01 on rank 1, 0.1 on rank 0)",
        "Step each scheduler on all ranks, with a value that is the same on all",
    ),
    "hang": (
        "2 of 2 ranks wait in a collective, for up to",
        "fabric.backward, train.py:14 in main, after 11 steps: waits in all_reduce of float32 (4160,)",
        "rank 1 fabric.all_gather, train.py:18 in main, after 11 steps: waits in all_reduce of float64 (1,)",
        "RuntimeError: The ranks did not make the same call, and would wait for each other forever.",
    ),
    "failure": ("rank 1 of 2 failed first: ValueError: sample 1734 has no label", "Traceback (most recent call last):"),
    "doctor": ("accelerator", "launcher", "strategy", "deepspeed_stage_3", "forkserver", "xla_fsdp"),
}
"""What each picture is there to show."""


def words_of(text: str) -> str:
    """Without colours, and with one space between words: lines are wrapped in a picture."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", text).split())


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_what_the_program_prints(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = (FOLDER / f"{name}.svg").read_text()
    shown = words_of(html.unescape(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL))))
    monkeypatch.setenv(template.FORKS, "yes")
    printed = words_of(seen(name, template.Popen))
    for words in SAID[name]:
        assert words in printed, printed
        assert words in shown, "run `make pictures`"
    assert "url(http" not in picture


def test_the_run_of_the_tutorial_that_is_stopped_on_two_ranks_goes_on_on_four(tmp_path: Path) -> None:
    program = block(ROOT / "docs/tutorial/3-a-checkpoint.md", 0)
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "stopped.py").write_text(
        program.replace("if fabric.should_stop:", "if fabric.should_stop or fabric.num_steps == 75:")
    )
    printed = []
    for devices, script in ((2, "stopped.py"), (4, "train.py")):
        command = [sys.executable, "-m", "fabric", "run", "--devices", str(devices), script]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", template.FORKS: "yes"}
        done = template.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    page = (ROOT / "docs/tutorial/3-a-checkpoint.md").read_text()
    assert printed[0] == "epoch 1: loss 0.4725\n"
    assert printed[1] == "resumed after step 75 on 4 ranks\nepoch 2: loss 0.2512\nepoch 3: loss 0.1922\n"
    assert all(line in page for line in printed[1].splitlines())
