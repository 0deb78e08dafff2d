"""The table of `docs/measurements/optimizers.md` is what is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, STRATEGIES, column, in_page, installed, seen_under
from torch import nn
from worlds import launch_each

from fabric import Fabric


def test_the_page_has_every_optimizer_under_every_strategy() -> None:
    for strategy in STRATEGIES:
        assert in_page(strategy).keys() == OPTIMIZERS.keys(), "run `make optimizers`, with all packages"


@pytest.mark.slow
def test_an_optimizer_trains_as_in_one_process_or_is_refused_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its step, a minute for each rank
    seen = seen_under(("ddp, shard_optimizer", "fsdp", "model_parallel"), installed())
    for strategy, found in seen.items():
        page = in_page(strategy)
        assert column(found) == {name: page[name] for name in installed()}, strategy


def losses_of_deepspeeds_muon(fabric: Fabric) -> list[float]:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
    for parameter in model.parameters():
        parameter.use_muon = True  # type: ignore[attr-defined]
    optimizer: Any = MuonWithAuxAdam([{"params": list(model.parameters()), "lr": 0.05, "use_muon": True}])
    model, optimizer = fabric.setup(model, optimizer)
    inputs, targets = torch.arange(64.0).view(8, 8).sin(), torch.arange(32.0).view(8, 4).cos()
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_deepspeeds_own_muon_trains_as_under_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # DeepSpeed compiles its step, two seconds for each rank
    strategies = ("ddp", "deepspeed_stage_1", "deepspeed_stage_2")
    found = launch_each(2, losses_of_deepspeeds_muon, [(strategy,) for strategy in strategies])
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * 2
