"""Ranks over Horovod, however they come to be and however they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import template
from forked_python import python
from processes import all_gone, run, running

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, signal, sys, time
import torch
from fabric import Fabric
from fabric.launchers import detect_world
from fabric.strategies import HorovodStrategy

launcher, doing, *devices = sys.argv[1:]
strategy = HorovodStrategy(timeout_seconds=10 if doing == "hang" else 60)
fabric = Fabric(
    accelerator="cpu", strategy=strategy, devices=int(devices[0]) if devices else "auto", launcher=launcher
)
fabric.launch()
model = fabric.setup(torch.nn.Linear(2, 1))
total = fabric.all_reduce(torch.tensor(2.0 ** fabric.global_rank), reduce_op="sum").item()
if doing == "wait":
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
if fabric.global_rank == 1:
    if doing == "raise":
        raise ArithmeticError("rank 1 cannot go on")
    if doing == "hang":
        time.sleep(10**6)
    if doing == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
while doing not in ("end", "close"):
    fabric.backward(model(torch.ones(1, 2)).sum())
world = detect_world(os.environ)
place = [world.launcher, world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.num_nodes]
sys.stdout.write(json.dumps([*place, total]) + "\\n")
sys.stdout.flush()
if doing == "close":
    fabric.close()
    with Fabric(accelerator="cpu", strategy="horovod", devices=world.size, launcher="auto") as again:
        again.launch()
        assert again.all_reduce(torch.tensor(1), reduce_op="sum").item() == world.size
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def by_horovodrun(size: int, *command: str | Path) -> list[str]:
    """Python's arguments for a program whose ranks horovodrun starts."""
    own = str(Path(sys.executable).with_name("horovodrun"))
    return [own, "--gloo", "-np", str(size), *map(str, command)]


def places(done: subprocess.CompletedProcess[str]) -> list[list[object]]:
    """What the ranks printed of themselves, by rank; horovodrun writes the rank before each line."""
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(line[line.index('["') :]) for line in done.stdout.splitlines() if '["' in line)


@pytest.mark.parametrize(("launcher", "size"), [("fork", 4), ("script", 2)])
def test_our_launchers_start_ranks_that_communicate_over_horovod(launcher: str, size: int, program: Path) -> None:
    found = places(run([program, launcher, "close", str(size)]))
    assert found == [[launcher, rank, size, rank, size, 0, 1, 2.0**size - 1] for rank in range(size)]


def test_ranks_of_horovodrun_communicate_over_horovod(program: Path) -> None:
    found = places(run(by_horovodrun(2, *python(), program, "auto", "close", "2")))
    assert found == [["horovod", rank, 2, rank, 2, 0, 1, 3.0] for rank in range(2)]


def test_ranks_of_torchrun_communicate_over_horovod(program: Path) -> None:
    by_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found = places(run([*by_torchrun, program, "auto", "close"], **{template.FORKS: "yes"}))
    assert found == [["torchelastic", rank, 2, rank, 2, 0, 1, 3.0] for rank in range(2)]


def test_a_number_of_devices_that_is_not_horovodruns_is_an_error_with_both(program: Path) -> None:
    done = run(by_horovodrun(2, *python(), program, "auto", "end", "3"))
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "ask for 3 processes on this node, but horovod started 2 processes (2 on this node; read: HOROVOD_" in output


def test_a_rank_that_raises_is_reported_first_and_ends_the_others_at_once(program: Path) -> None:
    for launcher in ("fork", "script"):
        start = time.monotonic()
        done = run([program, launcher, "raise", "2"])
        assert done.returncode == 1
        assert "rank 1 of 2 failed first: ArithmeticError: rank 1 cannot go on" in done.stderr
        assert done.stderr.rstrip().endswith("ArithmeticError: rank 1 cannot go on")
        assert time.monotonic() - start < 60, "the others waited until the time was over"


def test_a_rank_that_raises_ends_a_job_of_horovodrun(program: Path) -> None:
    start = time.monotonic()
    done = run(by_horovodrun(2, sys.executable, program, "auto", "raise"))
    assert done.returncode != 0
    assert "ArithmeticError: rank 1 cannot go on" in done.stdout + done.stderr
    assert time.monotonic() - start < 60


def test_a_rank_that_is_killed_is_reported_and_ends_the_others(program: Path) -> None:
    done = run([program, "fork", "kill", "2"])
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 of 2 failed first: killed by SIGKILL" in done.stderr


def test_a_rank_that_hangs_is_named_within_the_timeout_and_the_job_ends(program: Path) -> None:
    done = run([program, "fork", "hang", "2"])
    assert done.returncode == 1
    assert "rank 0 of 2 failed first: fabric.strategies.collectives.collective.CollectiveError: `all_reduce`" in (
        done.stderr
    )
    assert "waited 10 s: rank 0 arrived, rank 1 did not arrive." in done.stderr
    start = time.monotonic()
    external = run(by_horovodrun(2, sys.executable, program, "auto", "hang"))
    assert external.returncode != 0
    assert "waited 10 s: rank 0 arrived, rank 1 did not arrive." in external.stdout + external.stderr
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_no_rank_outlives_the_process_that_was_started(number: signal.Signals, program: Path) -> None:
    with running([program, "fork", "wait", "2"]) as started:
        started.wait_for("ready", times=2)
        started.process.send_signal(number)
        assert not all_gone(started, within_seconds=20)  # by themselves: after 30 s the supervisor kills them
