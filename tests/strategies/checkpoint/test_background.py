"""Saves that a thread writes while the loop goes on: what they have, and who hears that one failed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import pytest
import template
import torch
from devices import ACCELERATOR
from fakes import ThreadCollective, run_threads
from torch import nn

from fabric import CheckpointError, Fabric, WorkerError, read_checkpoint
from fabric.strategies.checkpoint.manifest import NAME
from fabric.strategies.checkpoint.storage import Buffer, Folder
from fabric.strategies.checkpoint.tensors import replicated
from fabric.strategies.checkpoint.write_and_commit import BackgroundSaves


def test_a_background_save_writes_the_state_at_the_call_not_after_the_next_step(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    for step in range(3):
        fabric.backward(model(torch.rand(2, 300)).sum())
        optimizer.step()
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        losses = {"all": [step]}
        pending = fabric.save(
            tmp_path / str(step), {"model": model, "optimizer": optimizer, "losses": losses}, blocking=False
        )
        numbers = torch.rand(3)
        losses["all"].append(-1)
        with torch.no_grad():
            model.weight.zero_()
        pending.wait()
        assert pending.is_done
        found = read_checkpoint(tmp_path / str(step))
        assert all(torch.equal(found["model"][name], tensor) for name, tensor in expected.items())
        assert found["losses"] == {"all": [step]}
        assert found["optimizer"]["state"][0]["step"] == step + 1
        fabric.load(tmp_path / str(step), {"model": model, "optimizer": optimizer})
        assert torch.equal(torch.rand(3), numbers)
    fabric.close()


@final
class Gated:
    """A folder in which no tensor is written before the gate is open; where it is None, none ever."""

    def __init__(self, folder: str, gate: threading.Event | None) -> None:
        self._folder, self._gate = Folder(Path(folder)), gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def write(self, name: str, blocks: Iterable[Buffer], **options: Any) -> None:
        if name.endswith(".bin"):
            if self._gate is None:
                raise OSError("the cable was pulled")
            self._gate.wait()
        self._folder.write(name, blocks, **options)


def save_with_a_slow_rank(collective: ThreadCollective, folder: str, gate: threading.Event) -> None:
    saves, opened = BackgroundSaves(collective), threading.Event()
    opened.set()
    state = {name: replicated(torch.arange(10), (0, 1)) for name in ("x", "y")} | {"rank": collective.rank}
    after: list[bool] = []
    storage = Gated(folder, gate if collective.rank == 1 else opened)
    pending = saves.start(storage, state, lambda: after.append((Path(folder) / NAME).exists()))
    assert collective.all_gather_object(collective.rank) == [0, 1]  # the loop's, while rank 1 writes
    assert not pending.is_done
    assert not (Path(folder) / NAME).exists()
    collective.barrier()
    gate.set()
    pending.wait()
    assert read_checkpoint(folder)["rank"] == 0
    assert after == ([True] if collective.rank == 0 else [])


def test_the_loop_continues_while_ranks_write_and_the_last_rank_completes_the_checkpoint(tmp_path: Path) -> None:
    run_threads(2, save_with_a_slow_rank, str(tmp_path), threading.Event())


@final
class Interrupting:
    """A folder that sends the main thread Ctrl-C before the first tensor is written, and writes once it is caught."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.begin, self.caught = Folder(folder), threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def write(self, name: str, blocks: Iterable[Buffer], **options: Any) -> None:
        if name.endswith(".bin"):
            self.begin.wait()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.caught.wait()
        self._folder.write(name, blocks, **options)


def wait_until_interrupted(fabric: Fabric, storage: Interrupting) -> None:
    storage.begin.set()
    fabric.wait_for_save()
    threading.Event().wait(60)  # it came a moment later


def begin_to_save(folder: Path) -> tuple[Fabric, Interrupting]:
    """A save in the background that waits for `begin`, and then interrupts the main thread."""
    fabric, storage = Fabric(accelerator=ACCELERATOR, devices=1), Interrupting(folder)
    fabric.barrier()  # it is connected
    fabric._connected.checkpoints._background.start(storage, {"x": torch.ones(3)})  # type: ignore[arg-type]
    return fabric, storage


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to a thread")
def test_a_save_that_ctrl_c_interrupts_the_wait_for_is_completed_when_the_fabric_is_closed(tmp_path: Path) -> None:
    fabric, storage = begin_to_save(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        wait_until_interrupted(fabric, storage)
    assert not (tmp_path / NAME).exists()
    storage.caught.set()
    fabric.close()
    assert read_checkpoint(tmp_path)["x"].sum() == 3


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to a thread")
def test_ctrl_c_while_the_fabric_is_closed_is_raised_once_the_save_is_complete(tmp_path: Path) -> None:
    fabric, storage = begin_to_save(tmp_path)
    storage.caught.set()
    storage.begin.set()
    with pytest.raises(KeyboardInterrupt):
        fabric.close()
    assert read_checkpoint(tmp_path)["x"].sum() == 3


def save_with_a_failing_rank(collective: ThreadCollective, folder: str) -> str:
    saves, opened = BackgroundSaves(collective), threading.Event()
    opened.set()
    old, new = (
        {name: replicated(each.clone(), range(3)) for name in "xyz"} for each in (torch.arange(10), torch.ones(10))
    )
    saves.start(Gated(folder, opened), old).wait()
    saves.start(Gated(folder, opened if collective.rank != 1 else None), new)
    with pytest.raises(CheckpointError) as raised:
        saves.finish()
    assert raised.value.rank == 1
    saves.finish()  # it was told
    return str(raised.value)


def test_a_failure_of_one_rank_in_the_background_raises_on_all_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    for sentence in run_threads(3, save_with_a_failing_rank, str(tmp_path)):
        assert "Rank 1 could not write the checkpoint" in sentence
        assert "OSError: the cable was pulled" in sentence
    assert torch.equal(read_checkpoint(tmp_path)["x"], torch.arange(10))
    assert len(os.listdir(tmp_path)) == 1 + 3


def test_a_value_that_cannot_be_saved_raises_in_the_call_of_a_background_save(tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    with pytest.raises(TypeError, match="at /x, which cannot be saved"):
        fabric.save(tmp_path / "saved", {"x": object()}, blocking=False)
    fabric.save(tmp_path / "saved", {"x": 1}, blocking=False)
    fabric.close()
    assert read_checkpoint(tmp_path / "saved") == {"x": 1}


def test_an_error_in_after_commit_leaves_the_checkpoint(tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    for blocking in (True, False):
        path = tmp_path / str(blocking)
        with pytest.raises(CheckpointError, match="is complete, but a step after that failed on rank 0: ZeroDivision"):
            fabric.save(path, {"x": torch.ones(3)}, blocking=blocking, after_commit=lambda: 1 / 0).wait()
        assert read_checkpoint(path)["x"].sum() == 3
    fabric.close()


FORGETFUL = """
import os, resource, signal, sys, torch
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
fabric.save(sys.argv[1], {"x": torch.ones(10)}, blocking=False)
fabric.wait_for_save()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
fabric.save(sys.argv[1], {"x": torch.ones(100_000)}, blocking=False)
print("the end of the script")
"""


@pytest.mark.slow
def test_a_failed_save_that_nobody_waited_for_is_reported_at_exit_with_a_nonzero_exit_code(tmp_path: Path) -> None:
    done = template.run([sys.executable, "-c", FORGETFUL, str(tmp_path / "saved")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "the end of the script\n"
    assert "Rank 0 could not write the checkpoint" in done.stderr
    assert "File too large" in done.stderr
    assert read_checkpoint(tmp_path / "saved")["x"].numel() == 10


def forget(fabric: Fabric, folder: str) -> str:
    fabric.save(f"{folder}/saved", {"x": torch.ones(10)}, blocking=False)
    model = fabric.setup(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)))
    if fabric.global_rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    fabric.save(f"{folder}/saved", {"model": model}, blocking=False)
    fabric.all_gather(torch.ones(3))
    return "the end of the function"


@pytest.mark.slow
def test_a_job_fails_if_its_last_save_failed_on_one_rank(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="Rank 1 could not write the checkpoint"):
        Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=2).launch(forget, str(tmp_path))
    assert read_checkpoint(tmp_path / "saved")["x"].numel() == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "steps"),
    [
        ("return", 0, [2]),
        ("exit", 0, [2]),
        ("raise", 1, [1, 2]),
        ("raise on one", 1, [1, 2]),
        ("interrupt", -signal.SIGINT, [1, 2]),
        ("interrupt, then kill one", -signal.SIGINT, [1]),
    ],
)
def test_a_job_that_ends_while_its_ranks_save_in_the_background_leaves_a_complete_checkpoint(
    tmp_path: Path, how: str, code: int, steps: list[int]
) -> None:
    """The save that is in progress completes if the job succeeds; a failure may cost it, but never the one before."""
    path = tmp_path / "saved"
    job = template.Popen(
        [sys.executable, str(Path(__file__).with_name("ending_jobs.py")), str(path), how],
        stderr=subprocess.PIPE,
        text=True,
    )
    if how.startswith("interrupt"):
        while not (tmp_path / "saved.pid").exists():
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGINT)
    _, reported = job.communicate(timeout=20 if how.endswith("kill one") else 100)  # ranks may take 30 s after Ctrl-C
    assert job.returncode == code, reported
    assert ("ZeroDivisionError: of the loop" in reported) == how.startswith("raise"), reported
    content = read_checkpoint(path)
    assert content["step"] in steps
    assert content["model"]["weight"].shape == (3, 3)
