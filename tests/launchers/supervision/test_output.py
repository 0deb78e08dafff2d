"""What ranks print: a file for each rank, and the rank before each line, on request."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import template
from processes import run, running

from fabric.launchers.process.failure import REASONS

PROGRAM = """
import os, signal, sys
from fabric import Fabric

def main(fabric, how):
    rank = fabric.global_rank
    print("from Python")
    os.system("echo from a subprocess >&2")
    sys.stderr.write("10 %\\r20 %\\r")
    os.write(1, b"x" * 300_000 + b"\\n")
    fabric.barrier()
    sys.stdout.write("the last words")
    sys.stdout.flush()
    if rank == 1 and how == "raise":
        raise ValueError("boom")
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        sys.stderr.flush()
        print()
        signal.pause()

if __name__ == "__main__":
    launcher, devices, how = sys.argv[1:]
    Fabric(accelerator="cpu", devices=int(devices), launcher=launcher).launch(main, how)
"""
LARGE = "x" * 300_000


def command(folder: Path, launcher: str, devices: int = 2, how: str = "", *options: str) -> list[str | Path]:
    (folder / "program.py").write_text(PROGRAM)
    logs = ["--log-dir", folder / "logs"]
    return ["-m", "fabric", "run", *logs, *options, folder / "program.py", launcher, str(devices), how]


FORKED = {template.FORKS: "yes"}
"""The program that `fabric run` becomes runs in the same process."""


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "logs").glob("*.log"))}


@pytest.mark.parametrize(
    "launcher",
    [
        "fork",
        pytest.param("forkserver", marks=pytest.mark.thorough),
        pytest.param("spawn", marks=pytest.mark.thorough),
        pytest.param("elastic", marks=pytest.mark.thorough),
    ],
)
def test_each_rank_has_a_file_with_all_that_it_and_its_subprocesses_print(tmp_path: Path, launcher: str) -> None:
    done = run(command(tmp_path, launcher), fresh=launcher == "spawn")
    assert done.returncode == 0, done.stderr
    files = contents(tmp_path)
    assert list(files) == ["rank-0.log", "rank-1.log"]
    for rank, text in enumerate(files.values()):
        assert re.match(rf"\n?# \d+-\d+-\d+ \d+:\d+:\d+: rank {rank} of 2 starts\n", text), text[:100]
        for words in ("from Python\n", "from a subprocess\n", f"{LARGE}\n", "the last words"):
            assert text.count(words) == 1, words
    assert done.stdout.count("x") == 2 * len(LARGE)  # and on the terminal as without files
    assert done.stderr.count("from a subprocess") == 2


@pytest.mark.slow
def test_each_line_is_shown_with_its_rank_and_never_mixed_with_another(tmp_path: Path) -> None:
    done = run(command(tmp_path, "fork", 2, "", "--prefix-output"), **FORKED)
    lines = sorted(done.stdout.splitlines())
    assert lines == sorted(
        f"[rank {rank}] {words}" for rank in (0, 1) for words in ("from Python", LARGE, "the last words")
    )
    progress = done.stderr.replace("\r", "\n")
    assert all(f"[rank {rank}] {words}\n" in progress for rank in (0, 1) for words in ("10 %", "20 %"))
    assert "[rank" not in contents(tmp_path)["rank-0.log"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "words"), [("raise", "ValueError: boom"), ("kill", "the last words")])
def test_the_file_of_a_rank_that_fails_ends_with_its_traceback(tmp_path: Path, how: str, words: str) -> None:
    done = run(command(tmp_path, "fork", 2, how), **FORKED)
    assert done.returncode == 1
    text = contents(tmp_path)["rank-1.log"]
    assert "the last words" in text
    assert words in text.strip().splitlines()[-1] or "killed by SIGKILL" in text
    (failure,) = re.findall(r"^# \d+-\d+-\d+ \d+:\d+:\d+: (.*)$", contents(tmp_path)["failures.log"], re.MULTILINE)
    assert (
        failure
        == {
            "raise": "rank 1 of 2 failed first: ValueError: boom",
            "kill": f"rank 1 of 2 failed first: killed by SIGKILL ({REASONS[signal.SIGKILL]})",
        }[how]
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_a_second_start_continues_the_file_and_one_process_has_a_file_too(tmp_path: Path) -> None:
    for _ in range(2):
        assert run(command(tmp_path, "auto", 1)).returncode == 0
    assert contents(tmp_path)["rank-0.log"].count("rank 0 of 1 starts") == 2


@pytest.mark.slow
def test_lines_are_in_the_file_while_the_rank_runs_and_ctrl_c_names_the_files(tmp_path: Path) -> None:
    with running(command(tmp_path, "fork", 2, "wait", "--prefix-output"), **FORKED) as program:
        program.wait_for("the last words\n", times=2)
        assert all("the last words" in text for text in contents(tmp_path).values())
        program.process.send_signal(signal.SIGINT)
        _, printed = program.process.communicate(timeout=30)
        assert program.process.returncode == -signal.SIGINT
        said = f"Ended by SIGINT: how each rank ended is in `{tmp_path / 'logs'}/rank-*.log`."
        assert said in printed.splitlines()
    assert all(text.strip().endswith("KeyboardInterrupt") for text in contents(tmp_path).values())


QUIET = """
import sys
import torch
from torch.utils.data import DataLoader
from fabric import Fabric

torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, launcher=sys.argv[1])
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
for batch in fabric.setup_dataloaders(DataLoader(torch.randn(8, 4), batch_size=2, num_workers=1)):
    fabric.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", "script"])
def test_a_script_that_ends_well_writes_nothing_to_stderr(tmp_path: Path, launcher: str) -> None:
    """torch has finalizers, which print errors where they run among modules that are gone."""
    (tmp_path / "program.py").write_text(QUIET)
    done = run([tmp_path / "program.py", launcher], fresh=True)
    assert (done.returncode, done.stderr) == (0, "")
