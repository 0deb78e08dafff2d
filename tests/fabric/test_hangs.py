"""A job that hangs says who waits for whom, under every strategy and however a rank came to be late."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import template
from processes import Program, running

pytestmark = pytest.mark.slow

PROGRAM = """
import ctypes, os, signal, sys, time
import torch
from fabric import Fabric
from fabric.strategies import DDPStrategy

def be_late(how):
    os.write(1, b"late\\n")
    if how == "python":
        signal.pause()
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "lock":
        ctypes.PyDLL(None).pause()
    if how == "elsewhere":
        torch.distributed.broadcast(torch.ones(3), src=1)
    if how == "metric":
        fabric.all_gather(torch.ones(3))
    if how == "receive":
        torch.distributed.recv(torch.ones(2), 0)
    if how == "loader":
        next(iter(torch.utils.data.DataLoader([1, 2], num_workers=1, collate_fn=lambda batch: signal.pause())))
    if how == "order":
        next(iter(loaders[1]))

how, strategy = sys.argv[1], sys.argv[2]
launcher = "external" if "TORCHELASTIC_RUN_ID" in os.environ else "fork"
os.chdir(os.path.dirname(__file__))
if strategy == "short":
    strategy = DDPStrategy(timeout_seconds=6)
options = dict(sanitize="start" if len(sys.argv) > 3 else False)  # in a watched step calls are compared before they run
fabric = Fabric(
    accelerator="cpu", strategy=strategy, devices=2, report_after_seconds=0.3, launcher=launcher, **options
)
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
if how == "order":
    loaders = [torch.utils.data.DataLoader(range(8), shuffle=True) for _ in range(2)]
    loaders = fabric.setup_dataloaders(*loaders)
for step in range(3):
    if step == 2 and fabric.global_rank == 1:
        be_late(how)
    fabric.backward(model(torch.randn(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


def line(words: str) -> str:
    """Where the program's line that holds `words` is."""
    return f"program.py:{next(number for number, text in enumerate(PROGRAM.splitlines(), 1) if words in text)}"


LATE = {
    "python": f"rank 1  {line('signal.pause()')} in be_late, after 2 steps: runs Python",
    "stopped": "rank 1  does not answer: process ",
    "lock": "is stopped, or in C code that holds Python's lock",
    "elsewhere": f"rank 1  {line('broadcast(')} in be_late, after 2 steps: waits in broadcast of float32 (3,)",
    "receive": f"rank 1  {line('recv(')} in be_late, after 2 steps: waits in recv",
    "loader": f"rank 1  {line('next(iter(torch')} in be_late, after 2 steps: waits for a worker of its DataLoader",
    "order": f"rank 1  {line('next(iter(loaders')} in be_late, after 2 steps: waits for rank 0 to begin an epoch",
}


def hanging(tmp_path: Path, how: str, strategy: str) -> list[str | Path]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return [tmp_path / "program.py", how, strategy]


def read_until(program: Program, words: str) -> str:
    """Read stderr to the line that holds `words`."""
    assert program.process.stderr is not None
    output = ""
    for line in program.process.stderr:
        output += line
        if words in line:
            return output
    raise AssertionError(f"{words!r} did not come; stderr was:\n{output}")


@pytest.mark.parametrize("how", LATE)
def test_the_table_shows_what_the_late_rank_does(tmp_path: Path, how: str) -> None:
    with running(hanging(tmp_path, how, "ddp")) as program:
        output = read_until(program, LATE[how])
    backward = f"fabric.backward, {line('fabric.backward')} in <module>, after 2 steps"
    assert f"rank 0  {backward}: waits in all_reduce of float32 (5,)" in output


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", "ddp_sharded"])
def test_the_table_shows_collectives_of_every_backend(tmp_path: Path, strategy: str) -> None:
    with running(hanging(tmp_path, "python", strategy)) as program:
        output = read_until(program, LATE["python"].removesuffix(": runs Python"))
    assert re.search(
        rf"rank 0  {CALLED}program\.py:\d+ in <module>, after 2 steps( and \d+ forwards)?: waits in ",
        output,
    )


def test_the_table_is_printed_again_while_the_ranks_still_wait(tmp_path: Path) -> None:
    with running(hanging(tmp_path, "python", "ddp")) as program:
        for _ in range(3):
            read_until(program, "1 of 2 ranks waits in a collective")
        assert program.process.poll() is None


def test_ranks_that_made_different_calls_raise_with_both(tmp_path: Path) -> None:
    with running(hanging(tmp_path, "elsewhere", "ddp")) as program:
        output = read_until(program, "failed first: RuntimeError: The ranks did not make the same call")
        output += read_until(program, "Make all ranks call the same operations, in the same order.")
        assert program.process.wait(30) == 1
    assert f"rank 1: {line('broadcast(')} in be_late: broadcast of float32 (3,)" in output
    assert f"rank 0: fabric.backward, {line('fabric.backward')} in <module>: all_reduce of float32 (5,)" in output


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_1"])
def test_a_metric_of_one_rank_raises_on_all(tmp_path: Path, strategy: str) -> None:
    with running(hanging(tmp_path, "metric", strategy)) as program:
        output = read_until(program, "failed first: RuntimeError: The ranks did not make the same call")
        output += read_until(program, "Make all ranks call the same operations, in the same order.")
        assert program.process.wait(30) == 1
    assert f"rank 1: fabric.all_gather, {line('fabric.all_gather(')} in be_late: all_reduce of float64 (1,)" in output


def test_in_a_watched_step_different_calls_raise_at_once(tmp_path: Path) -> None:
    with running([*hanging(tmp_path, "elsewhere", "ddp"), "sanitized"]) as program:
        output = read_until(program, "rank 1: broadcast, at")
        assert program.process.wait(30) == 1
    assert "CollectiveError: The 2 ranks did not make the same call:" in output
    assert f"rank 0: fabric.backward, {line('fabric.backward')} in <module>, after 2 steps (all_reduce)" in output


@pytest.mark.thorough
def test_the_timeout_error_names_the_call_that_a_rank_has_not_made(tmp_path: Path) -> None:
    with running(hanging(tmp_path, "python", "short")) as program:
        output = read_until(program, "rank 1: has not made it")
        assert f"rank 0: fabric.backward, {line('fabric.backward')} in <module>: all_reduce of float32" in output
        read_until(program, "failed first")
        assert program.process.stderr is not None
        output = program.process.stderr.read()
        assert program.process.wait(30) == 1
    words = "The others wait for rank 1, which may be slow, or in another part of the program."
    assert output.rstrip().endswith(f"\n\n{words}"), output


def test_ctrl_c_on_a_job_that_hangs_prints_the_table(tmp_path: Path) -> None:
    text = PROGRAM.replace("report_after_seconds=0.3", "report_after_seconds=3")
    (tmp_path / "program.py").write_text(text)
    with running([tmp_path / "program.py", "stopped", "ddp"]) as program:
        program.wait_for("late")
        read_until(program, "The others wait for rank 1.")  # the hang has lasted for long enough
        program.process.send_signal(signal.SIGINT)
        output = read_until(program, "The others wait for rank 1.")
        assert "does not answer: process " in output
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(30) == -signal.SIGINT


def test_a_healthy_job_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("report_after_seconds=0.3", "report_after_seconds=30"))
    with running([tmp_path / "program.py", "not", "ddp"]) as program:
        _, output = program.process.communicate(timeout=60)
    assert output == ""


@pytest.mark.thorough
def test_ranks_of_torchrun_print_the_table_and_end_themselves(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with running([*torchrun, tmp_path / "program.py", "metric", "ddp"]) as program:
        output = read_until(program, "after 2 steps: waits in all_reduce")
        for _ in range(2):
            output += read_until(
                program, f"rank 1: fabric.all_gather, {line('fabric.all_gather(')} in be_late: all_red"
            )
        assert program.process.wait(60) == 1
    for rank in (0, 1):
        assert f"rank {rank}: RuntimeError: The ranks did not make the same call" in output


PARTED = """
import torch
from fabric import Fabric

fabric = Fabric(
    accelerator="cpu", strategy="ddp", devices=2, launcher="fork", report_after_seconds=0.3, sanitize=False
)
fabric.launch()
model = fabric.setup(torch.nn.Linear(64, 1))
for step in range(3):
    try:
        loss = model(torch.randn(2, 64)).sum()
        fabric.backward(loss)
        if step == fabric.global_rank == 1:
            raise ValueError("a bad sample")
        fabric.all_reduce(loss.detach())
    except ValueError:
        pass
"""


def test_a_step_that_was_skipped_on_one_rank_raises_with_the_lines_of_both(tmp_path: Path) -> None:
    """One rank averages gradients, and the other one a loss: in one process group, gloo aborts."""
    (tmp_path / "program.py").write_text(PARTED)
    with running([tmp_path / "program.py"]) as program:
        _, output = program.process.communicate(timeout=60)
    assert "failed first: RuntimeError: The ranks did not make the same call" in output
    lines = PARTED.splitlines()
    for words in ("    fabric.backward(loss)", "    fabric.all_reduce("):
        assert f"program.py:{next(number for number, text in enumerate(lines, 1) if words in text)}" in output


ALONE = """
import os, sys
import torch
from fabric import Fabric

what, strategy, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
after, launcher = 0.3 if what == "saves" else 30, "external" if "RANK" in os.environ else "fork"
fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, launcher=launcher, report_after_seconds=after)
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=2))
for step, batch in enumerate(fabric.progress(loader)):
    fabric.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    if step == number and what == "saves" and fabric.is_global_zero:
        fabric.save("alone.ckpt", {"model": model})
    if step == number and what == "leaves" and fabric.global_rank == 1:
        break
"""
BACKWARD = next(number for number, text in enumerate(ALONE.splitlines(), 1) if "fabric.backward" in text)
CALLED = r"(fabric\.backward, |forward of a module, )?"
"""What a line calls whose collectives the backend makes."""
SAVE = next(number for number, text in enumerate(ALONE.splitlines(), 1) if "fabric.save" in text)


def end_alone(tmp_path: Path, *words: str, by: Sequence[str] = ()) -> str:
    """What the job prints to stderr until it fails. `by`: the program that starts its ranks."""
    (tmp_path / "program.py").write_text(ALONE)
    with running([*by, tmp_path / "program.py", *words], **{template.FORKS: "yes"}) as program:
        _, output = program.process.communicate(timeout=60)
    assert program.process.returncode == 1, output
    return output


@pytest.mark.parametrize(("strategy", "number"), [("ddp", 4), ("ddp", 0), ("fsdp", 4), ("deepspeed_stage_2", 4)])
def test_a_save_of_one_rank_is_named_with_its_line_and_step(tmp_path: Path, strategy: str, number: int) -> None:
    output = end_alone(tmp_path, "saves", strategy, str(number))
    steps = f"after {number + 1} step{'s' * (number > 0)}"
    assert re.search(rf"rank 0:? +fabric\.save, \S*program\.py:{SAVE} in <module>, {steps}", output), output
    assert re.search(
        rf"rank 1:? +(\w+, at )?{CALLED}\S*program\.py:{BACKWARD} in <module>, {steps}",
        output,
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_leaves_its_loop_ends_the_job_without_a_traceback_of_gloo(tmp_path: Path, strategy: str) -> None:
    output = end_alone(tmp_path, "leaves", strategy, "4")
    first, last = output.rstrip().splitlines()[0], output.rstrip().splitlines()[-1]
    assert re.match(
        rf"rank 0 of 2, \d+ ms \w+, at {CALLED}\S*program\.py:{BACKWARD} in <module>, after 5 st",
        first,
    )
    why = r"rank 1 of 2 failed first: left with exit code 0 after 5 steps( and \d+ forwards)? while other ranks still "
    assert re.match(why, last)
    assert "Traceback" not in output


def test_a_rank_that_leaves_its_loop_is_named_under_torchrun_too(tmp_path: Path) -> None:
    by = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    output = end_alone(tmp_path, "leaves", "ddp", "4", by=by)
    assert re.search(
        rf"rank 0 of 2, .* fabric\.backward, \S*program\.py:{BACKWARD} in <module>, after 5 steps: ", output
    )
    assert "\nrank 1 of 2 failed first: left after 5 steps while other ranks still communicated with it" in output
    assert "run_backward" not in output  # of the traceback of gloo's error


def test_a_rank_that_leaves_its_loop_in_a_watched_step_is_named_and_the_call_of_the_other_too(tmp_path: Path) -> None:
    output = end_alone(tmp_path, "leaves", "ddp", "0")
    assert "CollectiveError: The 2 ranks did not make the same call:" in output
    assert re.search(r"rank 0 of 2, .* forward of a module, \S*program\.py:\d+ in <module>, after 1 step: ", output)
    assert "rank 1 of 2 failed first: left with exit code 0 after 1 step while other ranks still communicated" in output


def test_on_a_terminal_a_report_begins_below_the_progress_bar_and_is_wrapped_at_words(tmp_path: Path) -> None:
    width = 80
    (tmp_path / "program.py").write_text(ALONE)
    master, slave = pty.openpty()
    command = [sys.executable, str(tmp_path / "program.py"), "saves", "ddp", "4"]
    environ = {**os.environ, "COLUMNS": str(width), "TERM": "xterm", template.FORKS: "yes"}
    with template.Popen(command, stdout=slave, stderr=slave, env=environ, cwd=tmp_path) as process:
        os.close(slave)
        seen = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while chunk := os.read(master, 4096):
                seen += chunk
        os.close(master)
        process.wait(60)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()).replace("\r", "\n").splitlines()
    # A busy machine reports an earlier collective as well: a rank may wait 0.3 s for one that is still in its set-up.
    starts = [number for number, line in enumerate(lines) if line.startswith("2 of 2 ranks wait in a collective")]
    reports = [lines[start : start + 6] for start in starts]
    rank_0 = f"rank 0 fabric.save, program.py:{SAVE} in <module>, after 5 steps: waits in all_reduce of float64 (1,)"
    report = next((report for report in reports if rank_0 in " ".join(" ".join(report).split())), [])
    assert report, lines
    assert max(map(len, report)) <= width
