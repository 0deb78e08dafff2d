"""The moving average of one process, and what it refuses. That every strategy gives its numbers is in the suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD
from worlds import run_world

from fabric import Fabric, read_checkpoint
from fabric.launchers.world import World


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator=ACCELERATOR, devices=1) as one:
        yield one


def test_the_checkpoint_of_a_moving_average_is_a_plain_state_dict_of_the_model(fabric: Fabric, tmp_path: Path) -> None:
    model = fabric.setup(nn.BatchNorm1d(3))
    average = fabric.ema(model, decay=0.5)
    with torch.no_grad():
        model.weight.add_(1)
        model.running_mean.add_(4)
    average.update()
    fabric.save(tmp_path / "run", {"average": average})
    assert model.weight.tolist() == [2.0] * 3
    saved = read_checkpoint(tmp_path / "run")["average"]
    assert saved["num_updates"] == 1
    plain = nn.BatchNorm1d(3)
    plain.load_state_dict(saved["model"])
    assert plain.weight.tolist() == [1.5] * 3
    assert plain.running_mean.tolist() == [4.0] * 3
    other = fabric.ema(model)
    fabric.load(tmp_path / "run", {"average": other})
    assert model.weight.tolist() == [2.0] * 3
    with other.applied():
        assert model.weight.tolist() == [1.5] * 3
        assert other.state_dict()["model"]["weight"].tolist() == [1.5] * 3


def test_an_average_cannot_be_updated_loaded_stepped_or_applied_while_it_is_applied(fabric: Fabric) -> None:
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.5))
    later, other = fabric.setup_optimizers(SGD(model.parameters(), lr=0.5)), nn.Linear(2, 1)
    average, before = fabric.ema(model), model.weight.detach().clone()
    for use in (
        average.update,
        lambda: average.applied().__enter__(),
        lambda: average.load_state_dict({}),
        optimizer.step,
        later.step,
    ):
        with average.applied(), pytest.raises(RuntimeError, match=r"within `average.applied\(\)`. Leave that context"):
            use()
    assert torch.equal(model.weight, before)
    with average.applied():
        SGD(other.parameters(), lr=0.5).step()
    optimizer.step()


def average_weights(world: World, strategy: str) -> list[str]:
    """Of a model with a frozen layer whose weights the program changes by hand."""
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, launcher="external") as fabric:
        fabric.launch()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        net[0].requires_grad_(False)
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.5))
        average, found = fabric.ema(model, decay=0.5), []
        for step in range(3):
            fabric.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and strategy != "deepspeed_stage_3":
                with torch.no_grad():
                    net[1].weight.mul_(0.5)
            average.update()
            with torch.no_grad():
                with average.applied():
                    found.append(f"{model(torch.ones(1, 4)).sum().item():.4f}")
                found.append(f"{model(torch.ones(1, 4)).sum().item():.4f}")
        return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_averages_under_deepspeed_follow_weights_that_the_program_changes() -> None:
    (alone,) = run_world(1, average_weights, "single_device")
    for strategy in ("deepspeed_stage_1", "deepspeed_stage_2"):
        assert run_world(2, average_weights, strategy) == [alone] * 2
    first, second = run_world(2, average_weights, "deepspeed_stage_3")
    assert first == second
    assert first[:2] == alone[:2]


def test_unsupported_decays_and_dtypes_raise(fabric: Fabric) -> None:
    model = fabric.setup(nn.Linear(2, 1))
    for decay in (1.0, -0.1, True, float("nan")):
        with pytest.raises(ValueError, match="a decay is a number from 0 to below 1"):
            fabric.ema(model, decay=decay)
    with pytest.raises(ValueError, match="has not set up"):
        fabric.ema(nn.Linear(2, 1))
    half = fabric.setup(nn.Linear(2, 1).bfloat16())
    half.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"parameters in torch.bfloat16: updates .* `precision='bf16-mixed'`"):
        fabric.ema(half)
