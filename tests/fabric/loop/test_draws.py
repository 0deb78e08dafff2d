"""Which random numbers the ranks draw: alike until they read data or a model is set up, apart after that, and as the
user seeds them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fabric.lightning
from fabric import Fabric

SIZE = 16


class Augmented(Dataset[Any]):
    """Numbers with noise of each generator."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.rand(()).item(), random.random(), float(np.random.rand())


def seed(number: int) -> None:
    torch.manual_seed(number), random.seed(number), np.random.seed(number)


def noise(fabric: Any, loader: Any) -> Any:
    """What each rank draws for its samples, by generator."""
    drawn = [torch.tensor([sample for batch in loader for sample in batch], dtype=torch.float64)]
    return fabric.all_gather(drawn[0]).transpose(1, 2)


def alike(of_ranks: Any) -> list[bool]:
    """For each generator, whether the first two ranks have drawn the same."""
    return [torch.equal(one, other) for one, other in zip(of_ranks[0], of_ranks[1], strict=True)]


def draw(fabric: Any) -> Any:
    drawn = torch.tensor([[torch.rand(()).item()], [random.random()], [np.random.rand()]], dtype=torch.float64)
    return fabric.all_gather(drawn)


def augment(fabric: Fabric, num_workers: int) -> dict[str, list[bool]]:
    found = {}
    seed(5)
    loader = fabric.setup_dataloaders(DataLoader(Augmented(), 4, collate_fn=list, num_workers=num_workers))
    found["data made before reading"] = alike(draw(fabric))
    found["without a model"] = alike(noise(fabric, loader))
    seed(5)
    fabric.setup(nn.Linear(2, 2))
    found["data made after it"] = alike(draw(fabric))
    found["after it"] = alike(noise(fabric, loader))
    found["in the loop"] = alike(draw(fabric))
    fabric.setup(nn.Linear(2, 2))
    seed(6)
    found["seeded alike"] = alike(noise(fabric, loader))
    seed(6 + fabric.global_rank)
    found["seeded by rank"] = alike(noise(fabric, loader))
    seed(6), random.seed(fabric.global_rank), np.random.seed(fabric.global_rank)
    found["all but torch seeded by rank"] = alike(noise(fabric, loader))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_augment_apart_from_the_first_batch_on_and_as_the_user_seeds_them(num_workers: int) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp") as ranks:
        assert ranks.launch(augment, num_workers) == {
            "data made before reading": [True] * 3,
            "without a model": [False] * 3,
            "data made after it": [True] * 3,
            "after it": [False] * 3,
            "in the loop": [False] * 3,
            "seeded alike": [True] * 3,
            "seeded by rank": [False] * 3,
            # as in torch, all generators of a worker are seeded from torch's
            "all but torch seeded by rank": [True, num_workers > 0, num_workers > 0],
        }


def seeds_stand(fabric: Fabric, path: str) -> dict[str, Any]:
    torch.manual_seed(3), random.seed(fabric.global_rank)
    before = random.getstate()
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found = {"first": torch.initial_seed() == 3}
    for seed in (4, 3):
        torch.manual_seed(seed)
        model.train()(torch.ones(1, 2))
        found[f"seeded by {seed}"] = torch.initial_seed() == seed
    found["seeded by rank"] = random.getstate() == before
    torch.manual_seed(7 + fabric.global_rank)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    expected = torch.rand(3)
    torch.manual_seed(9)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    model.eval()(torch.ones(1, 2))
    found["restored"] = torch.initial_seed() == 7 + fabric.global_rank and torch.equal(torch.rand(3), expected)
    return fabric.collective.all_gather_object(found)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_seeds_of_the_user_and_restored_states_stand(strategy: str, tmp_path: Path) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy) as ranks:
        first, second = ranks.launch(seeds_stand, str(tmp_path / "saved"))  # type: ignore[misc]
    assert first == second == dict.fromkeys(("first", "seeded by 4", "seeded by 3", "seeded by rank", "restored"), True)


def parts_nothing(fabric: Any) -> Any:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    fabric.setup(nn.Linear(2, 2))
    return alike(draw(fabric))


@pytest.mark.slow
def test_ranks_of_a_fabric_for_lightning_draw_alike() -> None:
    ranks = fabric.lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp", launcher="forkserver")
    assert ranks.launch(parts_nothing) == [True] * 3


def train(fabric: Fabric, how: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0 if how == "no draws" else 0.5), nn.Linear(4, 1))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(4):
        if how == "alike":
            torch.manual_seed(step)
        fabric.backward(model(torch.full((2, 4), float(step + fabric.global_rank))).sum())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alike", "apart", "no draws"])
def test_ranks_that_draw_the_same_for_different_data_are_reported_once(
    how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Fabric(accelerator=ACCELERATOR, devices=2, launcher="forkserver").launch(train, how)
    words = "All 2 ranks draw the same random numbers for different data: torch's generators are seeded alike, so"
    assert capfd.readouterr().err.count(words) == (how == "alike")
