"""`Throughput` and `measure_flops` of `fabric.lightning`: the keys and values of Lightning's, over the same calls."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput as LightningThroughput
from lightning.fabric.utilities.throughput import measure_flops as lightning_measure_flops
from torch import nn

from fabric.lightning.utilities.throughput import Throughput, measure_flops

OPTIONS: list[dict[str, Any]] = [
    {"window_size": 3},
    {"window_size": 2, "world_size": 4, "separator": "|"},
    {"window_size": 3, "world_size": 2, "available_flops": 1e6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("given", [(), ("lengths",), ("flops",), ("lengths", "flops")], ids=str)
def test_keys_and_values_are_those_of_lightning(options: dict[str, Any], given: tuple[str, ...]) -> None:
    ours, theirs = Throughput(**options), LightningThroughput(**options)
    for step in range(1, 7):
        counts = {"time": 0.25 * step**1.5, "batches": step, "samples": 3 * step}
        counts |= {name: {"lengths": 40 * step, "flops": 1000 + step}[name] for name in given}
        ours.update(**counts)  # type: ignore[arg-type]
        theirs.update(**counts)  # type: ignore[arg-type]
        found, expected = ours.compute(), theirs.compute()
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected)
    ours.reset()
    theirs.reset()
    again: dict[str, Any] = {"time": 1.0, "batches": 1, "samples": 2}
    ours.update(**again)
    theirs.update(**again)
    assert ours.compute() == theirs.compute() == again


@pytest.mark.parametrize("wrong", [{"time": 0.5}, {"batches": 0}, {"samples": 0}, {"lengths": 1}], ids=str)
def test_what_lightning_refuses_is_refused(wrong: dict[str, Any]) -> None:
    first: dict[str, Any] = {"time": 1.0, "batches": 1, "samples": 2, "lengths": 10}
    for kind in (Throughput, LightningThroughput):
        throughput = kind(window_size=3)
        throughput.update(**first)
        with pytest.raises(ValueError):  # noqa: PT011  # each in its own words
            throughput.update(**{**first, "time": 2.0, "batches": 2, "samples": 4, "lengths": 20, **wrong})


def test_flops_are_those_of_lightning() -> None:
    with torch.device("meta"):
        net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4)
    for loss in (None, torch.sum):
        assert measure_flops(net, lambda: net(x), loss) == lightning_measure_flops(net, lambda: net(x), loss) > 0
