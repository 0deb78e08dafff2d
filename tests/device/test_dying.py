"""A job whose ranks fail, hang, die or leave ends within seconds, and its report names the rank that did it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from processes import Program, running

PROGRAM = """
import os, signal, sys
import torch
from fabric import Fabric

def go_wrong(how):
    os.write(1, b"here\\n")
    if how == "waits":
        signal.pause()
    if how == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("no such class")
    if how == "exits":
        sys.exit(3)
    if how == "runs out of memory":
        import pretended_cuda
        pretended_cuda.limit_memory(fabric.device.index, 2**26)
        [torch.empty(2**22, device=fabric.device) for _ in range(5)]

os.chdir(os.path.dirname(__file__))
how, seconds, report = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
launcher = "external" if "TORCHELASTIC_RUN_ID" in os.environ else "fork"
times = {"timeout_seconds": seconds, "report_after_seconds": report}
# In a watched step calls would be compared before they run, and none would wait on a device.
num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", 3))
fabric = Fabric(accelerator="cuda", devices=num_devices, strategy="ddp", launcher=launcher, sanitize=False, **times)
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    if step == 2 and fabric.global_rank == 1:
        if how == "leaves":
            break
        go_wrong(how)
    loss = model(torch.randn(2, 4, device=fabric.device)).sum()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
"""


def line(words: str) -> str:
    """Where the program's line that holds `words` is."""
    return f"program.py:{next(number for number, text in enumerate(PROGRAM.splitlines(), 1) if words in text)}"


def going_wrong(folder: Path, how: str, timeout: float = 600.0, report_after: float = 1.0) -> list[str | Path]:
    (folder / "program.py").write_text(PROGRAM)
    return [folder / "program.py", how, str(timeout), str(report_after)]


def end_of(program: Program, expect: int) -> str:
    """What the program has written to stderr."""
    _, output = program.process.communicate(timeout=110)
    assert program.process.returncode == expect, output
    return output


@pytest.mark.parametrize(
    ("how", "exit_code", "words"),
    [
        ("raises", 1, "rank 1 of 3 failed first: ValueError: no such class"),
        ("exits", 3, "rank 1 of 3 failed first: left with exit code 3"),
        ("is killed", 137, "rank 1 of 3 failed first: killed by SIGKILL"),
        ("runs out of memory", 1, "rank 1 of 3 failed first: torch.OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_a_rank_that_fails_while_others_wait_for_it_is_the_one_that_is_reported(
    how: str, exit_code: int, words: str, tmp_path: Path
) -> None:
    with running(going_wrong(tmp_path, how, report_after=60.0)) as program:
        program.wait_for("here")
        output = end_of(program, exit_code)
    assert words in output
    assert "in a collective" not in output, "it ended only after a report of the hang"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("waits", f"rank 1      {line('signal.pause()')} in go_wrong"),
        ("is stopped", "rank 1      does not answer: process "),
    ],
)
def test_the_timeout_of_a_collective_ends_the_job_and_names_the_rank_that_did_not_come(
    how: str, words: str, tmp_path: Path
) -> None:
    with running(going_wrong(tmp_path, how, 8)) as program:
        program.wait_for("here")
        began = time.monotonic()
        output = end_of(program, 1)
        assert 7 < time.monotonic() - began < 20  # NCCL's watchdog would abort after 68 s
    report = output[output.index("failed first: ") :]
    assert "failed first: RuntimeError: A collective on the accelerator has waited for all of its" in report
    assert f"ranks 0, 2  fabric.backward, {line('fabric.backward')} in <module>" in report
    assert "waits in all_reduce of float32 (5,)" in report
    assert words in report
    assert report.splitlines()[-1].startswith("The others wait for rank 1")


def test_a_rank_that_leaves_ends_the_job_long_before_the_timeout(tmp_path: Path) -> None:
    with running(going_wrong(tmp_path, "leaves")) as program:
        output = end_of(program, 1)
    report = output[output.index("failed first: ") :]
    assert "RuntimeError: A collective of all ranks waits for a rank that has ended or cannot be reached" in report
    assert report.splitlines()[-1] == "The others wait for rank 1."


def test_ranks_of_torchrun_end_themselves_after_the_timeout(tmp_path: Path) -> None:
    by_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with running([*by_torchrun, *going_wrong(tmp_path, "waits", 8)]) as program:
        output = end_of(program, 1)
    assert "rank 0: RuntimeError: A collective on the accelerator has waited for all of its" in output
    assert "The others wait for rank 1" in output


def test_ctrl_c_on_a_job_that_hangs_prints_the_table_and_ends_it(tmp_path: Path) -> None:
    with running(going_wrong(tmp_path, "waits")) as program:
        program.wait_for("here")
        assert program.process.stderr is not None
        told = ""
        while "The others wait for rank 1" not in told:
            told += program.process.stderr.readline()
        program.process.send_signal(signal.SIGINT)
        end_of(program, -signal.SIGINT)
    assert f"fabric.backward, {line('fabric.backward')} in <module>" in told
    assert "waits in all_reduce of float32 (5,)" in told
