"""The table of `docs/measurements/optimizers.md` is what is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, STRATEGIES, column, in_page, installed, seen_under
from torch import nn

from fabric import Fabric


def test_the_page_has_every_optimizer_under_every_strategy() -> None:
    for strategy in STRATEGIES:
        assert in_page(strategy).keys() == OPTIMIZERS.keys(), "run `make optimizers`, with all packages"


MEASURED = ("ddp, shard_optimizer", "fsdp", "model_parallel")


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its step, a minute for each rank
        return seen_under(MEASURED, installed())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", MEASURED)
def test_an_optimizer_trains_as_in_one_process_or_is_refused_as_the_page_says(
    strategy: str, seen: dict[str, dict[str, Any]]
) -> None:
    page = in_page(strategy)
    assert column(seen[strategy]) == {name: page[name] for name in installed()}


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
    found = []
    for strategy in ("ddp", "deepspeed_stage_1", "deepspeed_stage_2"):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, launcher="forkserver")
        found.append(fabric.launch(losses_of_deepspeeds_muon))
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * 2
