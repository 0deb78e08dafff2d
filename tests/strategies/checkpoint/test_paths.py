"""Paths that users pass to `fabric.save` and `fabric.load`, and what else may be at them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn

from fabric import CheckpointDirectory, CheckpointError, Fabric, consolidate, read_checkpoint

STATE = {"x": torch.ones(3), "step": 1}


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator=ACCELERATOR, devices=1) as one:
        yield one


def test_a_save_removes_no_file_of_the_user_from_the_folder(fabric: Fabric, tmp_path: Path) -> None:
    names = ["config.json", "pytorch_model.bin", "model.0.bin", "weights.new", "t.0.json", "notes"]
    for name in names:
        (tmp_path / name).write_text("mine")
    for left in ("0123abcd.0.bin", "0123abcd.1.json", "manifest.json.new"):  # of a save that was killed
        (tmp_path / left).write_text("left over")
    for blocking in (True, False):
        fabric.save(tmp_path, STATE, blocking=blocking).wait()
        assert sorted(os.listdir(tmp_path)) == sorted([*names, "manifest.json", *_written(tmp_path)])
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def _written(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if len(name.split(".")[0]) == 8 and name.endswith(".0.bin")]


def test_a_tilde_is_the_folder_of_the_user(fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    fabric.save("~/runs/last", {"model": nn.Linear(2, 2)})
    assert (tmp_path / "runs" / "last" / "manifest.json").exists()
    model = nn.Linear(2, 2)
    fabric.load("~/runs/last", {"model": model})
    torch.save(model.state_dict(), tmp_path / "file.pt")
    fabric.load_raw("~/file.pt", model)
    assert list(read_checkpoint("~/runs/last")["model"]) == ["weight", "bias"]
    (exported,) = consolidate("~/runs/last", "~/model.safetensors")
    assert exported == tmp_path / "model.safetensors"
    fabric.load_raw("~/model.safetensors", model)
    directory = CheckpointDirectory("~/runs")
    directory.save(fabric, STATE)
    assert directory.latest() == str(tmp_path / "runs" / "000001")


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("", ValueError, "The path of a checkpoint is empty"),
        (None, TypeError, "is None, a `NoneType`. Pass a string or a `Path`"),
        (b"run", TypeError, "is b'run', a `bytes`. Pass a string or a `Path`"),
    ],
)
def test_what_is_no_path_raises(fabric: Fabric, path: Any, error: type[Exception], words: str) -> None:
    for call in (fabric.save, fabric.load):
        with pytest.raises(error, match=words):
            call(path, dict(STATE))
    with pytest.raises(error, match=words):
        CheckpointDirectory(path)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_file_in_the_way_of_the_folder_raises_and_is_kept(fabric: Fabric, tmp_path: Path, blocking: bool) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(CheckpointError, match=r"(File exists|Not a directory): '\S+/file"):
            fabric.save(path, STATE, blocking=blocking).wait()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89HDF\r\n\x1a\n", b"PK", b"PK\x03\x04", b"\x80"])
def test_a_file_that_is_no_checkpoint_raises(fabric: Fabric, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "notes").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"`notes` is damaged, `torch\.save` did not write it"):
        fabric.load(tmp_path / "notes", {"model": nn.Linear(2, 2)})


def test_a_newer_format_raises_with_both_versions(fabric: Fabric, tmp_path: Path) -> None:
    fabric.save(tmp_path, STATE)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version":3', '"version":4', 1))
    with pytest.raises(CheckpointError, match=r"version 4, but this release of torchfabric reads .*, version 3"):
        fabric.load(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="mounts a file system")
def test_a_read_only_folder_raises_and_its_checkpoint_can_be_loaded(fabric: Fabric, tmp_path: Path) -> None:
    fabric.save(tmp_path / "run", STATE)
    read_only = ["mount", "--bind", "-o", "ro", str(tmp_path), str(tmp_path)]
    if subprocess.run(read_only, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        for blocking in (True, False):
            with pytest.raises(CheckpointError, match="Read-only file system"):
                fabric.save(tmp_path / "run", STATE, blocking=blocking).wait()
            with pytest.raises(CheckpointError, match="Read-only file system"):
                CheckpointDirectory(tmp_path / "new").save(fabric, STATE, blocking=blocking).wait()
        assert fabric.load(tmp_path / "run")["step"] == 1
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
