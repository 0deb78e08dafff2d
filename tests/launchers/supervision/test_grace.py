"""How long ranks may go on after SIGTERM: as long as a save takes, or as long as was asked for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from processes import Program, running

PROGRAM = """
import os, sys
import torch
from fabric import Fabric
from fabric.launchers.supervision import supervisor

supervisor.GRACE_SECONDS = 0.5  # as if the save took a minute
folder, strategy, launcher, way, *grace = sys.argv[1:]

class Slow:
    def state_dict(self):
        if way == "blocking":
            wait()
        return {"x": 1}

    def load_state_dict(self, state):
        pass

def wait():
    os.write(1, b"saving\\n")
    open(f"{folder}/go{fabric.global_rank}").read()  # blocks until the test writes

grace = {"stop_grace_seconds": float(grace[0])} if grace else {}
fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, launcher=launcher, **grace)
fabric.launch()
model = fabric.setup(torch.nn.Linear(4, 4))
while not fabric.should_stop:
    after = None if way == "blocking" else wait  # on rank 0, in the thread that writes
    state = {"model": model, "slow": Slow()}
    fabric.save(f"{folder}/checkpoint", state, blocking=way == "blocking", after_commit=after).wait()
fabric.close()
os.write(1, b"saved\\n")
"""
pytestmark = pytest.mark.slow


def start(folder: Path, *words: str) -> list[str | Path]:
    (folder / "program.py").write_text(PROGRAM)
    for rank in range(2):
        os.mkfifo(folder / f"go{rank}")
    return [folder / "program.py", folder, *words]


def read_until(program: Program, words: str) -> str:
    assert program.process.stderr is not None
    read = ""
    for line in program.process.stderr:
        read += line
        if words in line:
            return read
    raise AssertionError(f"{words!r} did not come; stderr was:\n{read}")


@pytest.mark.parametrize(
    ("strategy", "launcher", "way"),
    [("ddp", "fork", "blocking"), ("fsdp", "script", "blocking"), ("ddp", "fork", "in a thread")],
)
def test_a_save_that_is_in_progress_is_completed(tmp_path: Path, strategy: str, launcher: str, way: str) -> None:
    ranks = range(2) if way == "blocking" else range(1)
    with running(start(tmp_path, strategy, launcher, way)) as program:
        program.wait_for("saving", times=len(ranks))
        program.process.send_signal(signal.SIGTERM)
        read_until(program, "0.5 s to end, and longer for a save")  # said after 2 s: the grace is over
        for rank in ranks:
            (tmp_path / f"go{rank}").write_text("go")
        program.wait_for("saved", times=2)
        assert program.process.wait(30) == 0
    assert (tmp_path / "checkpoint").is_dir()


def test_a_grace_that_was_asked_for_is_kept_to_in_a_save_too(tmp_path: Path) -> None:
    with running(start(tmp_path, "ddp", "fork", "blocking", "2.5")) as program:
        program.wait_for("saving", times=2)
        program.process.send_signal(signal.SIGTERM)
        assert read_until(program, "may take up to 2.5 s to end. Send it again")
        assert program.process.wait(30) == -signal.SIGTERM
    assert not (tmp_path / "checkpoint").exists()
