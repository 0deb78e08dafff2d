"""A module and an optimizer load what torch would load into them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from fabric import Fabric


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric(accelerator=ACCELERATOR, devices=1)
    yield made
    made.close()


def trained(fabric: Fabric, model: nn.Module) -> tuple[nn.Module, Optimizer]:
    model, optimizer = fabric.setup(model, AdamW(model.parameters()))
    fabric.backward(model(torch.rand(4, 3)).square().sum())
    optimizer.step()
    return model, optimizer


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    return [each for entries in optimizer.state.values() for each in entries.values()]


def test_an_optimizer_that_has_stepped_gets_the_saved_values(tmp_path: Path, fabric: Fabric) -> None:
    model, optimizer = trained(fabric, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    for _ in range(2):
        fabric.backward(model(torch.rand(4, 3)).square().sum())
        optimizer.step()
    fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), saved, rtol=0, atol=0)


def test_an_optimizer_that_was_loaded_in_inference_mode_steps(tmp_path: Path, fabric: Fabric) -> None:
    model, optimizer = trained(fabric, nn.Linear(3, 3))
    fabric.save(tmp_path / "saved", {"optimizer": optimizer})
    new = AdamW(model.parameters())
    with torch.inference_mode():
        fabric.load(tmp_path / "saved", {"optimizer": new})
    new.step()
    assert [int(each["step"]) for each in new.state.values()] == [2, 2]


def test_an_optimizer_that_has_not_stepped_gets_new_tensors(tmp_path: Path, fabric: Fabric) -> None:
    _, optimizer = trained(fabric, nn.Linear(3, 3))
    fabric.save(tmp_path / "saved", {"optimizer": optimizer})
    for _ in range(2):
        new = AdamW(nn.Linear(3, 3).parameters())
        fabric.load(tmp_path / "saved", {"optimizer": new})
        torch.testing.assert_close(new.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
        for each in tensors_of(new):  # of a mapped file, it would be in the next load
            each.fill_(7)


class Swapping(nn.Module):
    """Reads states of a release in which two layers had each other's names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for end in ("weight", "bias"):
            one, other = f"{prefix}first.{end}", f"{prefix}second.{end}"
            state_dict[one], state_dict[other] = state_dict[other], state_dict[one]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_swaps_names_in_load_state_dict_gets_the_right_tensors(tmp_path: Path, fabric: Fabric) -> None:
    old, new = Swapping(), Swapping()
    fabric.save(tmp_path / "saved", {"model": old})
    fabric.load(tmp_path / "saved", {"model": new})
    torch.testing.assert_close(new.first.state_dict(), old.second.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(new.second.state_dict(), old.first.state_dict(), rtol=0, atol=0)


def test_weights_of_another_dtype_and_layout_are_converted_as_torch_does(tmp_path: Path, fabric: Fabric) -> None:
    old, new = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3).to(torch.float64, memory_format=torch.channels_last)
    fabric.save(tmp_path / "saved", {"model": old})
    fabric.load(tmp_path / "saved", {"model": new})
    assert new.weight.dtype == torch.float64
    assert new.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(new.weight.float(), old.weight, rtol=0, atol=0)
