"""What a kill of all ranks in the middle of a save leaves, what a full disk does, and a planted pickle."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import template
import torch
from devices import ACCELERATOR
from processes import free_port

from fabric import CheckpointError, Fabric, read_checkpoint
from fabric.strategies.checkpoint.manifest import NAME

KILLED = Path(__file__).with_name("killed_ranks.py")


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [8, pytest.param(50, marks=pytest.mark.thorough)])
def test_killing_all_ranks_at_any_byte_of_a_save_leaves_the_previous_or_the_new_checkpoint(
    tmp_path: Path, num_kills: int
) -> None:
    seed = random.randrange(2**31)
    arguments = [str(tmp_path), str(num_kills), str(seed), str(free_port())]
    done = template.run([sys.executable, str(KILLED), *arguments], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(trials) == num_kills, seed
    for trial in trials:
        assert trial["signals"] == [signal.SIGKILL, signal.SIGKILL], trial
        assert trial["found"] in (trial["before"], *([trial["step"]] if trial["moment"] == "after" else [])), trial
        assert trial["whole"], trial
        if trial["moment"] == "bytes":  # the victim was in the middle of writing
            assert trial["num_bytes"] < trial["full_bytes"], trial
            assert 0 <= trial["num_bytes"] - trial["written"] < 2**14, trial  # the rest is in the buffer of the file
    assert {trial["moment"] for trial in trials} == {"bytes", "commit", "after"}
    assert trials[-1]["left_at_the_end"] == 3  # a save that comes to its end: the manifest, and a file of each rank


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[None]:
    """A file system of its own where this process may mount one; elsewhere files that may not grow further."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        return
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_full_disk_is_reported_and_leaves_only_the_last_checkpoint(tmp_path: Path, blocking: bool) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    path = tmp_path / "disk"
    with small_disk(path, 2**20):
        fabric.save(path / "saved", {"x": torch.ones(1000)})
        files = sorted(os.listdir(path / "saved"))
        with pytest.raises(CheckpointError, match=r"(No space left on device|File too large)"):
            fabric.save(path / "saved", {"x": torch.zeros(2**19)}, blocking=blocking).wait()
        assert sorted(os.listdir(path / "saved")) == files
        assert read_checkpoint(path / "saved")["x"].sum() == 1000
    fabric.close()


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def test_a_pickle_in_place_of_or_next_to_any_file_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    fabric, marker = Fabric(accelerator=ACCELERATOR, devices=1), tmp_path / "ran"
    planted = pickle.dumps(Evil(marker))
    for place in ("manifest", "bytes", "beside"):
        path = tmp_path / place
        fabric.save(path, {"x": torch.ones(100), "y": 1})
        (file,) = path.glob("*.bin")
        if place == "manifest":
            (path / NAME).write_bytes(planted)
        elif place == "bytes":
            file.write_bytes(planted.ljust(400, b"\0"))
        else:
            for name in (".metadata", "data.pkl", "x.pt", f"{file.name}.0.json"):
                (path / name).write_bytes(planted)
        for load in (fabric.load, read_checkpoint):
            if place == "beside":
                assert load(path)["y"] == 1
                continue
            with pytest.raises(CheckpointError) as raised:
                load(path)
            assert "weights_only" not in str(raised.value)
    assert not marker.exists()
    fabric.close()
