"""One program over all devices: the numbers of one process, with weights and moments in shards.

Each in a process of its own, for SPMD is for good.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpu_replicas import CHOSEN, by_part

from fabric.testing import Case, cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = """
import copy, json, sys
import numpy, torch, torch_xla
from torch_xla.distributed.spmd import Mesh, mark_sharding
from fabric import Fabric
from fabric.testing import cases
from fabric.testing.checks import examine

size, seed, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
spec = torch_xla._XLAC._get_xla_sharding_spec
fabric = Fabric(accelerator="xla", strategy="xla_fsdp", devices=size)
some = [case for case in cases() if case.name in names]
seen = {"cases": {f.case: [f.result, f.message] for f in fabric.launch(examine, some, seed=seed)}}

fabric = Fabric(accelerator="xla", strategy="xla_fsdp", devices=size)
model = torch.nn.Linear(6, 8 * size)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
for x, y in fabric.setup_dataloaders([(torch.ones(2 * size, 6), torch.ones(3)), (torch.ones(1, 6), torch.ones(()))]):
    seen.setdefault("batches", []).append([spec(x), spec(y)])
    fabric.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
seen["weight"] = spec(model.weight)
seen["moment"] = spec(optimizer.state[model.weight]["exp_avg"])
seen["world"] = [fabric.world_size, fabric.global_rank]

alone = torch.nn.Sequential(torch.nn.Linear(4 * size, 8 * size), torch.nn.Linear(8 * size, 4))
model = fabric.to_device(copy.deepcopy(alone))
mesh = Mesh(numpy.arange(size), (1, size), ("data", "tensor"))
mark_sharding(model[0].weight, mesh, (None, "tensor"))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
(x,) = fabric.setup_dataloaders([torch.randn(2 * size, 4 * size)])
for _ in range(3):
    for each, one, batch in ((model, optimizer, x), (alone, optimizer_alone, x.cpu())):
        loss = each(batch).square().mean()
        fabric.backward(loss) if each is model else loss.backward()
        one.step()
        one.zero_grad()
    losses = [model(x).square().mean().item(), alone(x.cpu()).square().mean().item()]
    seen.setdefault("losses", []).append(losses)
seen["marked"] = [spec(model[0].weight), spec(optimizer.state[model[0].weight]["momentum_buffer"])]
seen["rest"] = spec(model[1].weight)
fabric.close()
print(json.dumps(seen))
"""
LATE = """
import torch_xla
from fabric import Fabric
torch_xla.device()
Fabric(accelerator="xla", strategy="xla_fsdp").launch()
"""


def run(folder: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, str(path), *map(str, arguments)]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=800)


@pytest.fixture(scope="module")
def seen_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the program with a part of the cases has seen."""

    @functools.cache
    def run_part(part: str) -> dict[str, Any]:
        seed = random.randrange(2**31)
        print(f"seed {seed}")
        names = [case.name for case in cases() if (case.name in CHOSEN) == (part == "chosen")]
        done = run(tmp_path_factory.mktemp("spmd"), PROGRAM, os.environ["CPU_NUM_DEVICES"], seed, *names)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run_part


@pytest.fixture(scope="module")
def seen(seen_in: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return seen_in("chosen")


@pytest.mark.parametrize(("part", "case"), by_part())
def test_one_program_over_all_devices_gives_the_numbers_of_one_process(
    seen_in: Callable[[str], dict[str, Any]], part: str, case: Case
) -> None:
    found = seen_in(part)["cases"][case.name]
    assert found[0] == "equal", found


def test_weights_moments_and_batches_are_cut_over_the_devices(seen: dict[str, Any]) -> None:
    size = int(os.environ["CPU_NUM_DEVICES"])
    devices = ",".join(map(str, range(size)))
    rows = f"{{devices=[{size},1]{devices}}}"
    assert seen["weight"] == seen["moment"] == rows
    assert seen["batches"] == [[rows, ""], ["", ""]]  # 3 labels, and one sample, cannot be divided
    assert seen["world"] == [1, 0]


def test_what_the_user_has_marked_stays_as_it_is_and_gives_the_numbers_of_one_device(seen: dict[str, Any]) -> None:
    size = int(os.environ["CPU_NUM_DEVICES"])
    devices = ",".join(map(str, range(size)))
    assert seen["marked"] == [f"{{devices=[1,{size}]{devices}}}"] * 2
    assert seen["rest"] == f"{{devices=[1,{size}]{devices}}}"  # along its longest dim
    for ours, alone in seen["losses"]:
        assert ours == pytest.approx(alone, rel=1e-5)
    assert seen["losses"][0] > seen["losses"][-1]


def test_a_device_touched_before_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, LATE)
    assert done.returncode == 1
    assert "`strategy='xla_fsdp'` must be set in XLA before that." in done.stderr
