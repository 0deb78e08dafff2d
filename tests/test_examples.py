"""Every example runs as a person runs it, in two processes on the CPU; every block of Python in the README too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"

pytestmark = pytest.mark.slow


def run_program(*words: str, cwd: Path, expect: int = 0) -> str:
    """What the program printed. It and all that it started are gone afterwards."""
    command = [sys.executable, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=110)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == expect, output
    return output


def two(example: str) -> list[str]:
    return [str(EXAMPLES / example), "--accelerator", "cpu", "--devices", "2"]


def test_digits_are_read_in_two_processes(tmp_path: Path) -> None:
    output = run_program(*two("digits.py"), "--epochs", "6", cwd=tmp_path)
    last = re.findall(r"epoch 5: (\d+\.\d+)% of (\d+) held-out digits", output)
    assert len(last) == 1, output
    assert float(last[0][0]) >= 97
    assert last[0][1] == "359"
    assert "samples/s" in output


def test_digits_read_badly_are_a_failure_that_is_told_once(tmp_path: Path) -> None:
    output = run_program(*two("digits.py"), "--epochs", "1", "--batch-size", "512", cwd=tmp_path, expect=1)
    assert output.count("of the held-out digits are read right; 97% are expected.") == 1


def test_the_plain_loop_reads_them_too(tmp_path: Path) -> None:
    output = run_program(str(EXAMPLES / "digits_torch.py"), "--epochs", "4", cwd=tmp_path)
    assert output.count("held-out digits") == 4


def test_the_two_loops_over_the_digits_differ_in_the_lines_of_fabric_only() -> None:
    with_fabric = (EXAMPLES / "digits.py").read_text().splitlines()
    plain = (EXAMPLES / "digits_torch.py").read_text().splitlines()
    added = [line for line in with_fabric if line.strip() and line not in plain]
    foreign = [line for line in added if not re.search(r"fabric|--accelerator|--strategy|--devices|plain loop", line)]
    assert not foreign
    assert len(added) <= 20


def test_the_gpt_learns_saves_loads_and_writes(tmp_path: Path) -> None:
    small = ["--batch-size", "8", "--context", "64", "--write", "20", "--unseen", "32"]
    learning = ["--steps", "30", "--validate-every", "15", "--save", "gpt.ckpt", "--below", "5"]
    output = run_program(*two("byte_gpt.py"), *small, *learning, cwd=tmp_path)
    half, end = (float(nats) for nats in re.findall(r"step \d+: ([\d.]+) nats per unseen byte", output))
    assert end < half < 5.5  # a uniform guess is 5.545
    reloaded = run_program(*two("byte_gpt.py"), *small, "--steps", "0", "--resume", "gpt.ckpt", cwd=tmp_path)
    nats = re.findall(r"^([\d.]+) nats per unseen byte", reloaded, re.MULTILINE)
    assert [float(one) for one in nats] == [end]
    assert "def " in reloaded


def test_the_gpt_learns_in_bfloat16(tmp_path: Path) -> None:
    small = ["--batch-size", "4", "--context", "32", "--write", "1", "--unseen", "32", "--steps", "5", "--below", "5.5"]
    run_program(*two("byte_gpt.py"), *small, "--precision", "bf16-mixed", cwd=tmp_path)


def test_a_loss_that_is_not_below_what_was_asked_for_is_a_failure(tmp_path: Path) -> None:
    small = ["--batch-size", "4", "--context", "32", "--write", "1", "--unseen", "32", "--steps", "1", "--below", "0"]
    output = run_program(*two("byte_gpt.py"), *small, cwd=tmp_path, expect=1)
    assert output.count("nats per byte is not below 0.0.") == 1


def test_the_gan_draws_digits_with_two_models_and_two_optimizers(tmp_path: Path) -> None:
    output = run_program(*two("gan.py"), "--epochs", "2", cwd=tmp_path)
    losses = re.search(r"generator loss ([\d.]+)  discriminator loss ([\d.]+)\n", output)
    assert losses is not None
    picture = output[losses.end() :].splitlines()
    assert len(picture) == 8


def blocks_of_python() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks_of_python())))
def test_a_block_of_python_in_the_readme_runs(number: int, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(blocks_of_python()[number])
    run_program(str(script), cwd=tmp_path)


def test_the_readme_lists_the_strategies_that_there_are() -> None:
    from fabric.strategies.registry import strategy_registrations

    text = README.read_text()
    table = text[text.index("| `strategy=` |") : text.index('"Others" are what torch finds')]
    listed = {
        name for row in table.splitlines() if row.startswith("|") for name in re.findall(r"`(\w+)`", row.split("|")[1])
    } - {"strategy"}
    assert listed == {name for name, one in strategy_registrations().items() if one.source == "torchfabric"}
