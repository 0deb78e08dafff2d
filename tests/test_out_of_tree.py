"""A package of somebody else's brings an accelerator and a strategy, and nothing here knows of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import template
import torch
from torch import nn

pytestmark = pytest.mark.slow

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "fabric-abacus"
version = "1.0"

[project.entry-points."fabric.accelerators"]
abacus = "abacus:AbacusAccelerator"

[project.entry-points."fabric.strategies"]
abacus_average = "abacus:AverageStrategy"
"""
PACKAGE = '''
"""Devices that are the CPU under another name, and gradients averaged one by one as they come."""

from dataclasses import dataclass
from functools import partial

import torch

from fabric.strategies import Strategy
from fabric.strategies.accelerators import Accelerator
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.prepared import place, replica
from fabric.strategies.runtime import open_runtime


@dataclass(frozen=True)
class AbacusAccelerator(Accelerator):
    name = "abacus"
    backend = "gloo"
    is_shared = False

    def num_devices(self):
        return 2

    def why_unavailable(self):
        return None

    def device(self, index):
        return torch.device("cpu")

    def set_device(self, index):
        pass


def average(collective, parameter):
    parameter.grad = collective.all_reduce(parameter.grad, "mean")


@dataclass(frozen=True, kw_only=True)
class AverageStrategy(Strategy):
    launchers = ("script", "fork", "forkserver", "spawn")

    def refuse(self, target):
        if target.accelerator.name == "abacus":
            return None
        return "Only an abacus counts by hand. Pass `accelerator='abacus'`."

    def connect(self, world, accelerator, devices, precision):
        device = accelerator.device(devices[world.local_rank])
        return open_runtime(world, [device], TorchCollective(world, accelerator.backend, device=device), precision)

    def setup(self, runtime, module, optimizers, move):
        place(runtime, module, optimizers, move=move)
        hooks = []
        for parameter in module.parameters():
            parameter.data.copy_(runtime.collective.broadcast(parameter.data))
            hooks.append(parameter.register_post_accumulate_grad_hook(partial(average, runtime.collective)))
        return replica(runtime, module, optimizers, end=lambda: [hook.remove() for hook in hooks])
'''
SCRIPT = """
import json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from fabric import Fabric

fabric = Fabric(accelerator="abacus", strategy="abacus_average", devices=2, precision="64-true")
fabric.launch()
torch.manual_seed(3 + fabric.global_rank)  # weights follow rank 0
model = nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
samples = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
for x in fabric.setup_dataloaders(DataLoader(samples, batch_size=4)):
    optimizer.zero_grad()
    fabric.backward((model(x) - x.sum(dim=1, keepdim=True)).square().mean())
    optimizer.step()
fabric.print(json.dumps({name: value.tolist() for name, value in model.state_dict().items()}))
fabric.close()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed, from a wheel that is built here."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "abacus.py").write_text(PACKAGE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(site), str(source)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def python(environment: dict[str, str], *arguments: str | Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = template.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_strategy_and_accelerator_of_another_package_train_like_one_process(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = json.loads(python(environment, tmp_path / "train.py"))
    torch.manual_seed(3)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for x in samples.split(8):
        optimizer.zero_grad()
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    expected = {name: value.tolist() for name, value in model.state_dict().items()}
    torch.testing.assert_close(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()},
        {name: torch.tensor(value, dtype=torch.float64) for name, value in expected.items()},
        rtol=1e-10,
        atol=1e-10,
    )


def test_fabric_doctor_lists_the_strategy_and_accelerator_of_another_package(environment: dict[str, str]) -> None:
    report = json.loads(python(environment, "-m", "fabric", "doctor", "--json"))
    (accelerator,) = (row for row in report["accelerators"] if row["name"] == "abacus")
    (strategy,) = (row for row in report["strategies"] if row["name"] == "abacus_average")
    assert accelerator == {"name": "abacus", "devices": 2, "why_not": None}
    assert (strategy["source"], strategy["runs_on"]) == ("fabric-abacus", ["abacus"])
