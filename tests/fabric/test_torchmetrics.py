"""Metrics of torchmetrics, as they are: they synchronise by themselves, or take what `gather_for_metrics` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World

SIZE = 23
LOGITS = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
TARGETS = torch.randint(3, (SIZE,), generator=torch.Generator().manual_seed(2))


def metrics() -> Any:
    """One that sums, and one that keeps all values."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    return MetricCollection([MulticlassAccuracy(3), MulticlassAUROC(3)])


def evaluated(world: World) -> dict[str, dict[str, Tensor]]:
    """Each rank updates with its own batches; the last ones are unequal."""
    from torchmetrics import MeanSquaredError  # takes seconds, which only this test needs
    from torchmetrics.aggregation import CatMetric

    fabric = Fabric(accelerator=ACCELERATOR, strategy="ddp" if world.size > 1 else "single_device", devices=world.size)
    fabric._connect(world)
    with fabric:
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(LOGITS, TARGETS), 4), use="validate")
        own, order, error = fabric.to_device(metrics()), CatMetric(), MeanSquaredError()
        values = []
        for logits, targets in loader:
            own.update(logits, targets)
            order.update(targets)
            error.update(logits[:, 0], targets / 2)
            values.append((logits, targets))
        logits, targets = fabric.gather_for_metrics(values, loader)
        gathered = metrics()
        for metric in gathered.values():
            metric.sync_on_compute = False
        gathered.update(logits, targets)
        return {
            "own": dict(own.compute()),
            "gathered": dict(gathered.compute()),
            "others": {"error": error.compute(), "targets": order.compute().sort().values},
        }


@pytest.mark.slow
def test_metrics_of_two_ranks_equal_those_of_one_process() -> None:
    alone = evaluated(World())
    torch.testing.assert_close(alone["own"], alone["gathered"])
    torch.testing.assert_close(alone["others"]["targets"], TARGETS.sort().values.float())
    for together in run_world(2, evaluated):
        torch.testing.assert_close(together, alone)
