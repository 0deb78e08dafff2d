"""Checkpoints from and to a device, saved while training goes on or not; and what a loader brings to a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric, seed_everything

pytestmark = pytest.mark.slow


def ranks(accelerator: str, size: int, strategy: str) -> Fabric:
    return Fabric(accelerator=accelerator, devices=size, strategy=strategy, launcher="forkserver")


def parts(fabric: Fabric, seed: int, dropout: float = 0.0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 8))
    prepared: tuple[nn.Module, Any] = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return prepared


def train(fabric: Fabric, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Each rank has its share of a step's eight samples."""
    losses = []
    for step in steps:
        x_bf = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        mine_bf = fabric.to_device(x_bf[fabric.global_rank :: fabric.world_size])
        loss = (model(mine_bf) - mine_bf.roll(1, dims=1)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss).item())
    return losses


def save_and_go_on(fabric: Fabric, path: str) -> list[float]:
    model, optimizer = parts(fabric, seed=1)
    train(fabric, model, optimizer, range(3))
    fabric.save(path, {"model": model, "optimizer": optimizer, "tensor": torch.ones(3, device=fabric.device)})
    return train(fabric, model, optimizer, range(3, 6))


def load_and_go_on(fabric: Fabric, path: str) -> tuple[list[float], set[str]]:
    model, optimizer = parts(fabric, seed=2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "tensor": None}
    fabric.load(path, state)
    moments = [each for state in optimizer.state.values() for each in state.values() if each.ndim]
    where = {each.device.type for each in (*model.parameters(), *moments)}
    assert state["tensor"].device.type == "cpu"
    return train(fabric, model, optimizer, range(3, 6)), where


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("saves", "loads"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_on_the_other_kind_of_device_with_the_same_losses(
    saves: str, loads: str, strategy: str, tmp_path: Path
) -> None:
    expected = ranks(saves, 2, strategy).launch(save_and_go_on, str(tmp_path / "saved"))
    found = ranks(loads, 2, strategy).launch(load_and_go_on, str(tmp_path / "saved"))
    assert found is not None
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)
    assert found[1] == {loads}


def resume(fabric: Fabric, path: str) -> tuple[list[float], list[float]]:
    seed_everything(3)
    model, optimizer = parts(fabric, seed=1, dropout=0.5)
    state = {"model": model, "optimizer": optimizer}

    def steps() -> list[float]:
        noise = torch.rand(2, device=fabric.device)
        return [*noise.tolist(), *train(fabric, model, optimizer, range(3))]

    steps()
    fabric.save(path, state)
    first = steps()
    fabric.load(path, state)
    return first, steps()


@pytest.mark.parametrize(("strategy", "size"), [("single_device", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 1)])
def test_dropout_and_noise_on_the_device_are_resumed_bit_for_bit(strategy: str, size: int, tmp_path: Path) -> None:
    found = ranks("cuda", size, strategy).launch(resume, str(tmp_path / "saved"))
    assert found is not None
    first, second = found
    assert first == second
    assert len(set(first)) == len(first)


def save_in_the_background(fabric: Fabric, path: str) -> None:
    """Twice, so that the second save has the pinned memory of the first."""
    model, optimizer = parts(fabric, seed=1)
    for number in range(2):
        train(fabric, model, optimizer, range(2))
        before = fabric.state_dict(model, optimizer, all_ranks=True)
        pending = fabric.save(f"{path}/{number}", {"model": model, "optimizer": optimizer}, blocking=False)
        train(fabric, model, optimizer, range(2, 8))
        pending.wait()
        saved = fabric.load(f"{path}/{number}")
        torch.testing.assert_close((saved["model"], saved["optimizer"]), before, rtol=0, atol=0)


@pytest.mark.parametrize(("strategy", "size"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
def test_steps_after_a_save_in_the_background_change_nothing_of_it(strategy: str, size: int, tmp_path: Path) -> None:
    """Nor does pinned memory change while it is copied: the pretended runtime raises where it does."""
    ranks("cuda", size, strategy).launch(save_in_the_background, str(tmp_path))


def read(fabric: Fabric, words: dict[str, Any]) -> list[Any]:
    data = torch.arange(40.0).repeat(1000, 1).T.contiguous()  # 4 kB a sample
    generator = torch.Generator().manual_seed(1)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(data), 4, shuffle=True, generator=generator, **words))
    sums = torch.zeros(1000, device=fabric.device)
    rows = []
    for _ in range(2):
        for (batch_bf,) in loader:
            assert batch_bf.device == fabric.device
            sums += batch_bf.sum(dim=0)
            rows.append(batch_bf[:, 0].clone())
    return [sums.tolist(), [each.tolist() for each in rows]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_the_same_samples_on_the_device_pinned_or_not_with_workers_or_without(num_workers: int) -> None:
    expected = ranks("cpu", 2, "ddp").launch(read, {})
    for pin_memory in (False, True):
        words = {"pin_memory": pin_memory, "num_workers": num_workers}
        assert ranks("cuda", 2, "ddp").launch(read, words) == expected, words
