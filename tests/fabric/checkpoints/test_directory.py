"""The checkpoints of a run: their names, which are kept, and what a dead job leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from devices import ACCELERATOR

from fabric import CheckpointDirectory, CheckpointError, Fabric, read_checkpoint
from fabric.strategies.checkpoint.storage import storage_of
from fabric.strategies.checkpoint.write_and_commit import plan, write


def numbers(directory: CheckpointDirectory) -> list[int]:
    return [int(os.path.basename(path)[:6]) for path in directory.all()]


def place(tmp_path: Path, kind: str) -> str:
    return str(tmp_path / "run") if kind == "local" else f"memory://{tmp_path.name}/run"


@pytest.mark.parametrize("kind", ["local", "fsspec"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_numbers_continue_after_a_resume_and_the_newest_checkpoints_are_kept_whatever_their_steps(
    tmp_path: Path, kind: str, blocking: bool
) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    directory = CheckpointDirectory(place(tmp_path, kind), keep_last=2)
    assert directory.latest() is None
    assert directory.load(fabric, {"x": 0}) is None
    for step in (100, 200, 300):
        directory.save(fabric, {"x": torch.full((3,), step)}, step=step, blocking=blocking)
    fabric.wait_for_save()
    assert numbers(directory) == [2, 3]
    resumed = CheckpointDirectory(place(tmp_path, kind), keep_last=2)
    for step in (150, 250):  # it went back to an older checkpoint
        saved = resumed.save(fabric, {"x": torch.full((3,), step)}, step=step, blocking=blocking)
        state = {"x": torch.zeros(3)}
        assert resumed.load(fabric, state) == saved.path == resumed.latest()  # true, for `if checkpoints.load(...)`
        assert state["x"].eq(step).all()
    assert numbers(resumed) == [4, 5]
    assert str(resumed.latest()).endswith("000005-step-250")
    fabric.close()


def test_the_best_checkpoints_are_kept_too_and_nan_is_never_the_best_metric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    directory = CheckpointDirectory(tmp_path, keep_last=1, keep_best=2, best="max")
    for metric in (0.1, 0.5, float("nan"), 0.5, 1e-07, float("-inf")):
        directory.save(fabric, {"x": 1}, metric=metric)
    assert numbers(directory) == [2, 4, 6]
    assert str(directory.best()).endswith("000004-metric-0.5")
    directory.save(fabric, {"x": 1})  # of a job that is preempted before it knows a metric
    assert numbers(directory) == [2, 4, 7]
    assert str(directory.latest()).endswith("000007")
    fabric.close()


@pytest.mark.parametrize("kind", ["local", "fsspec"])
def test_an_incomplete_checkpoint_is_never_loaded_and_the_next_save_removes_it(tmp_path: Path, kind: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    directory = CheckpointDirectory(place(tmp_path, kind))
    directory.save(fabric, {"x": 1})
    root = storage_of(directory.path)
    write(root.inside("000002-step-7"), plan({"x": torch.ones(3)}, 0, "t"))  # killed before the manifest
    root.inside("of somebody else").commit("notes", b"...")
    assert numbers(directory) == [1]
    directory.save(fabric, {"x": 3}, step=8)
    assert sorted(root.folders()) == ["000001", "000003-step-8", "of somebody else"]
    fabric.close()


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_failed_save_removes_no_older_checkpoint(tmp_path: Path, blocking: bool) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    directory = CheckpointDirectory(tmp_path, keep_last=1)
    directory.save(fabric, {"x": 1})
    (tmp_path / "000002").write_text("in the way")
    os.rename(tmp_path / "000002", tmp_path / "000002-step-2")
    with pytest.raises(CheckpointError, match="could not write"):
        directory.save(fabric, {"x": 2}, step=2, blocking=blocking).wait()
    assert read_checkpoint(str(directory.latest())) == {"x": 1}
    fabric.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"keep_last": 0}, "1 or more"), ({"keep_best": -1}, "0 or more"), ({"best": "least"}, "write 'min'")],
)
def test_values_of_keep_last_that_would_keep_nothing_raise(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CheckpointDirectory("run", **arguments)  # type: ignore[arg-type]


def test_a_negative_step_raises_because_its_name_could_not_be_read(tmp_path: Path) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        directory = CheckpointDirectory(tmp_path)
        with pytest.raises(ValueError, match="`step=-1`: the number of steps"):
            directory.save(fabric, {"x": 1}, step=-1)
        directory.save(fabric, {"x": 1}, step=torch.tensor(3))  # type: ignore[arg-type]
        assert str(directory.latest()).endswith("000001-step-3")


def with_a_metric_on_rank_zero(fabric: Fabric, path: str) -> str:
    directory = CheckpointDirectory(path, keep_best=1)
    directory.save(fabric, {"x": 1}, metric=0.5 if fabric.global_rank == 0 else None)
    return os.path.basename(str(directory.best()))


@pytest.mark.slow
def test_the_metric_of_rank_zero_counts_and_is_enough(tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=2)
    assert fabric.launch(with_a_metric_on_rank_zero, str(tmp_path)) == "000001-metric-0.5"


@pytest.mark.parametrize("metric", [torch.ones(2), "low"], ids=["vector", "word"])
def test_a_metric_that_is_not_one_number_raises(tmp_path: Path, metric: Any) -> None:
    with (
        Fabric(accelerator=ACCELERATOR, devices=1) as fabric,
        pytest.raises(ValueError, match=r"`metric=.*`: one number"),
    ):
        CheckpointDirectory(tmp_path).save(fabric, {"x": 1}, metric=metric)


def use_a_file(fabric: Fabric, path: str) -> list[str]:
    found = []
    for call in ("save", "load"):
        with pytest.raises(CheckpointError) as caught:
            getattr(CheckpointDirectory(path), call)(fabric, {"x": 1})
        found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_a_file_in_place_of_the_directory_raises_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    found = Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=2).launch(use_a_file, str(tmp_path / "run"))
    assert found is not None
    assert all("Not a directory" in sentence or "is a file" in sentence for sentence in found), found


def test_a_trailing_slash_of_an_address_is_ignored(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/run/000001/manifest.json", b"{}")
    assert CheckpointDirectory(f"memory://{tmp_path.name}/run/").latest() == f"memory://{tmp_path.name}/run/000001"
