"""One file, whole or not there; what fails on one rank fails on all."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import template
import torch
from devices import ACCELERATOR
from torch import nn
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies.checkpoint.errors import CheckpointError
from fabric.strategies.checkpoint.other_formats import load, save
from fabric.strategies.checkpoint.state import ObjectStates
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.collectives.single import SingleDeviceCollective


def alone() -> SingleDeviceCollective:
    collective = SingleDeviceCollective()
    collective.setup()
    return collective


def test_a_saved_state_is_loaded_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 3, "deep": {"list": [torch.ones(2), "word"]}}
    save(alone(), tmp_path / "new" / "file.ckpt", ObjectStates().read(state))
    other = nn.Linear(2, 2)
    target: dict[str, Any] = {"model": other, "step": 0}
    rest = ObjectStates().restore(target, load(alone(), tmp_path / "new" / "file.ckpt"), strict=True)
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    assert target["step"] == 3
    assert set(rest) == {"optimizer", "deep"}
    assert float(rest["optimizer"]["state"][0]["step"]) == 1.0


def test_a_compiled_module_is_saved_under_the_names_of_the_module_itself(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(alone(), tmp_path / "file", ObjectStates().read({"model": torch.compile(model, backend="eager")}))
    assert list(load(alone(), tmp_path / "file")["model"]) == ["weight", "bias"]
    ObjectStates().restore(
        {"model": torch.compile(nn.Linear(2, 2), backend="eager")},
        load(alone(), tmp_path / "file"),
        strict=True,
    )


def test_a_filter_selects_entries() -> None:
    state = ObjectStates().read({"model": nn.Linear(2, 2), "step": 1}, {"model": lambda name, value: name == "bias"})
    assert list(state["model"]) == ["bias"]


def test_a_filter_for_an_unknown_name_raises_with_the_names_in_the_state() -> None:
    with pytest.raises(ValueError, match="`filter` has 'optimizer', but the state has 'model'"):
        ObjectStates().read({"model": nn.Linear(1, 1)}, {"optimizer": lambda name, value: True})


def test_a_filter_on_a_value_without_entries_raises() -> None:
    with pytest.raises(TypeError, match=r"`state\['step'\]` is a `int`"):
        ObjectStates().read({"step": 1}, {"step": lambda name, value: True})


def test_strict_loading_raises_with_the_missing_names() -> None:
    with pytest.raises(KeyError, match="optimizer"):
        ObjectStates().restore({"optimizer": None}, {"model": 1}, strict=True)
    assert ObjectStates().restore({"optimizer": None}, {"model": 1}, strict=False) == {"model": 1}


def test_loading_runs_no_code_from_the_file(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"evil": _Evil(str(marker))}, tmp_path / "file")
    with pytest.raises(CheckpointError, match="Rank 0 could not read the checkpoint"):
        load(alone(), tmp_path / "file")
    assert not marker.exists()


def test_a_file_with_the_shards_of_one_rank_raises_on_loading(tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy="fsdp", devices=1)
    model = fabric.setup(nn.Linear(2, 2))
    torch.save({"net": [model.state_dict()]}, tmp_path / "by hand")
    with pytest.raises(CheckpointError, match="The file has DTensors: it was written by hand from"):
        fabric.load_raw(tmp_path / "by hand", model)
    fabric.close()


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def save_badly(world: World, folder: str) -> tuple[str, bool, list[str]]:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"))
    collective.setup()
    path = Path(folder) / "file"
    save(collective, path, {"value": torch.ones(10)})
    if world.rank == 0:  # a disk that is full after 100 KB
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        save(collective, path, {"value": torch.ones(100_000)})
    except CheckpointError as error:
        intact = bool(load(collective, path)["value"].eq(torch.ones(10)).all())
        collective.teardown()
        return str(error), intact, sorted(os.listdir(folder))
    raise AssertionError("a save onto a full disk returned")


@pytest.mark.slow
def test_a_full_disk_raises_on_every_rank_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    for sentence, intact, files in run_world(2, save_badly, str(tmp_path)):
        assert "Rank 0 could not write the checkpoint" in sentence
        assert "File too large" in sentence or "write" in sentence
        assert intact
        assert files == ["file"]


VICTIM = """
import sys, torch
from pathlib import Path
from fabric.strategies.checkpoint.other_formats import save
from fabric.strategies.collectives.single import SingleDeviceCollective
torch.set_num_threads(1)
collective = SingleDeviceCollective()
collective.setup()
for step in range(10**6):
    save(collective, sys.argv[1], {"a": torch.full((300_000,), step), "b": torch.full((300_000,), step)})
    print(step, flush=True)
"""


@pytest.mark.slow
def test_killing_a_process_during_a_save_leaves_a_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    for _ in range(4):
        victim = template.Popen([sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE)
        assert victim.stdout is not None
        for _ in range(1 + int(torch.randint(20, (), generator=generator))):
            victim.stdout.readline()
        victim.kill()
        victim.wait()
        victim.stdout.close()
        content = load(alone(), path)
        assert torch.equal(content["a"], content["b"])
        assert bool(content["a"].eq(content["a"][0]).all())
