"""However the process that the user started ends, nobody of ours outlives it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from processes import all_gone, running

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from fabric.launchers import Topology, detect_world, join
from fabric.launchers.choose import choose_launcher

def body(world, doing):
    dist.init_process_group("gloo", store=join(world, 60, print), rank=world.rank, world_size=world.size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    loader = iter(DataLoader(list(range(10**6)), num_workers=2 if doing == "workers" else 0))
    next(loader)
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    if doing == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sys.stdout.write("deaf\\n")
        sys.stdout.flush()
        while True:
            pass
    if doing == "deadlock" and world.rank == 0:
        time.sleep(10**6)
    while True:
        dist.all_reduce(tensor)
        if doing == "workers":
            next(loader)

def main():
    word, doing, way = sys.argv[1:]
    function = body if way == "function" else None
    launcher = choose_launcher(word, Topology(num_processes=2), function=function, world=detect_world(os.environ))
    if function is None:
        body(launcher.enter(), doing)
    launcher.launch(body, doing)

if __name__ == "__main__":
    main()
"""
WAYS = [("fork", "line"), ("script", "line"), ("fork", "function"), ("forkserver", "function"), ("spawn", "function")]
pytestmark = pytest.mark.slow


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize(
    ("word", "way", "doing"),
    [(*way, "deadlock") for way in WAYS]
    + [(*way, doing) for way in (WAYS[0], WAYS[3]) for doing in ("loop", "stubborn", "workers")],
)
def test_no_rank_survives_kill_dash_nine_of_the_supervisor(program: Path, word: str, way: str, doing: str) -> None:
    with running([program, word, doing, way]) as started:
        started.wait_for("deaf" if doing == "stubborn" else "ready", times=2)
        assert len(started.descendants()) >= 2
        started.process.kill()
        assert started.process.wait() == -signal.SIGKILL
        assert all_gone(started) == {}


@pytest.mark.parametrize(
    ("word", "way", "doing", "number"),
    [(*way, "loop", signal.SIGTERM) for way in WAYS]
    + [(*WAYS[0], "loop", number) for number in (signal.SIGINT, signal.SIGHUP)]
    + [(*WAYS[3], "loop", signal.SIGINT), (*WAYS[0], "workers", signal.SIGTERM)],
)
def test_a_signal_to_the_supervisor_ends_all_ranks_and_the_supervisor(
    program: Path, word: str, way: str, doing: str, number: signal.Signals
) -> None:
    with running([program, word, doing, way]) as started:
        started.wait_for("ready", times=2)
        started.process.send_signal(number)
        assert started.process.wait(30) == -number
        assert all_gone(started) == {}


@pytest.mark.parametrize(("word", "way"), [WAYS[0], WAYS[3]])
def test_a_second_signal_ends_ranks_that_ignore_the_first(program: Path, word: str, way: str) -> None:
    with running([program, word, "stubborn", way]) as started:
        started.wait_for("deaf", times=2)
        assert started.process.stderr is not None
        started.process.send_signal(signal.SIGINT)
        started_to_wait = os.read(started.process.stderr.fileno(), 4096).decode()
        assert (
            "Got SIGINT: rank 0, 1 may take up to 30 s to end, and longer for a save. Send it again to end them now."
            in started_to_wait
        )
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(30) == -signal.SIGINT
        assert all_gone(started) == {}


def test_ctrl_c_in_a_deadlock_ends_it(program: Path) -> None:
    with running([program, "fork", "deadlock", "line"]) as started:
        started.wait_for("ready", times=2)
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(30) == -signal.SIGINT
        assert all_gone(started) == {}
