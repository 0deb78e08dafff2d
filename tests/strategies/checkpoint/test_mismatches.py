"""What does not fit is said all at once, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn

from fabric import CheckpointError, Fabric


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator=ACCELERATOR, devices=1) as one:
        yield one


def model_and_optimizer(width: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    return model, torch.optim.AdamW(model.parameters())


def test_all_mismatches_are_raised_as_one_table_and_nothing_is_changed(fabric: Fabric, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(4)
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer, "deep": {"critic": nn.Linear(2, 2)}})
    other, _ = model_and_optimizer(5)
    other.append(nn.Linear(5, 1))
    critic = nn.Linear(2, 2, bias=False)
    state: dict[str, Any] = {
        "model": other,
        "optimizer": torch.optim.AdamW(other.parameters()),
        "deep": {"critic": critic},
        "step": 7,
    }
    before = [parameter.clone() for parameter in (*other.parameters(), *critic.parameters())]
    with pytest.raises(CheckpointError) as caught:
        fabric.load(tmp_path / "saved", state)
    found = [line.split() for line in str(caught.value).splitlines()]
    for line in (
        "model: 0.weight (5, 3) (4, 3)",
        "model: 1.running_mean (5,) (4,)",
        "model: 2.weight (1, 5) missing",
        "optimizer `AdamW`, groups of [6] parameters groups of [4]",
        "deep/critic: bias missing (2,)",
        "step `int` missing",
    ):
        assert line.split() in found, f"{line}: {caught.value}"
    assert "\nThe checkpoint has 'model', 'optimizer', 'deep': name these entries. `fabric.load_raw(" in str(
        caught.value
    )
    assert all(map(torch.equal, before, (*other.parameters(), *critic.parameters())))
    assert state["step"] == 7


def test_entries_left_out_with_strict_false_are_reported(
    fabric: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = nn.Linear(2, 2)
    fabric.save(tmp_path / "saved", {"model": saved})
    torch.save(saved.state_dict(), tmp_path / "bare")
    for load in (lambda to: fabric.load(tmp_path / "saved", {"model": to, "step": 1}, strict=False),) + (
        lambda to: fabric.load_raw(tmp_path / "bare", to, strict=False),
    ):
        model = nn.Linear(2, 2, bias=False)
        model.register_buffer("extra", torch.ones(3))
        with caplog.at_level(logging.WARNING, logger="fabric"):
            load(model)
        assert torch.equal(model.weight, saved.weight)
        reported = [line.split() for line in caplog.messages[-1].splitlines()]
        assert ["extra", "(3,)", "missing"] in [line[-3:] for line in reported]
        assert ["bias", "missing", "(2,)"] in [line[-3:] for line in reported]
    caplog.clear()
    fabric.load(tmp_path / "saved", {"model": nn.Linear(2, 2)}, strict=False)
    assert not caplog.messages


def test_a_different_shape_raises_with_and_without_strict(fabric: Fabric, tmp_path: Path) -> None:
    fabric.save(tmp_path / "saved", {"model": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match=r"model: weight +\(3, 2\) +\(2, 2\)"):
        fabric.load(tmp_path / "saved", {"model": nn.Linear(2, 3)}, strict=False)


def test_a_module_that_converts_older_states_still_converts_them(fabric: Fabric, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(lambda module, state, *_: state.update(weight=state.pop("old")))
    fabric.save(tmp_path / "saved", {"model": {"old": torch.ones(2, 2), "bias": torch.ones(2)}})
    fabric.load(tmp_path / "saved", {"model": model})
    assert torch.equal(model.weight, torch.ones(2, 2))


def load_into_another(fabric: Fabric, path: Path) -> tuple[str, bool]:
    """Save a model and load it into another one of the strategy: the error, and whether the weights are unchanged."""
    fabric.save(path, {"model": fabric.setup(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))})
    other = fabric.setup(nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 4, bias=False)))
    before = fabric.state_dict(other)
    with pytest.raises(CheckpointError) as caught:
        fabric.load(path, {"model": other})
    after = fabric.state_dict(other)
    return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp_fully_sharded"])
def test_shapes_of_shards_are_compared_as_whole_ones_and_nothing_is_changed(tmp_path: Path, strategy: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2)
    error, is_unchanged = fabric.launch(load_into_another, tmp_path / "saved")
    found = [line.split() for line in error.splitlines()]
    for line in ("model: 0.weight (5, 3) (4, 3)", "model: 0.bias (5,) (4,)", "model: 1.bias missing (4,)"):
        assert line.split() in found, error
    assert is_unchanged


def test_the_state_of_another_optimizer_raises_with_the_options_that_it_lacks(fabric: Fabric, tmp_path: Path) -> None:
    """torch loads it, and fails in the next step, or trains with the options of the other."""
    model, optimizer = model_and_optimizer(4)
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    other = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"`SGD`, which needs momentum, dampening +an optimizer with lr, betas"):
        fabric.load(tmp_path / "saved", {"optimizer": other})
    assert other.param_groups[0]["lr"] == 0.1
    adam = torch.optim.Adam(model.parameters(), 0.1)  # has the same options
    fabric.load(tmp_path / "saved", {"optimizer": adam})
    assert adam.param_groups[0]["lr"] == 1e-3
