"""Launching over XLA, as a program of its own: results and errors come home, and no device is touched before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric.launchers import Topology, World
from fabric.launchers.xla import XLA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SIZE = int(os.environ["CPU_NUM_DEVICES"])

PROGRAM = """
import json, sys
import cpu_replicas
from fabric import Fabric
from fabric.launchers.launcher import Topology, WorkerError
from fabric.launchers.xla import XLA
from fabric.strategies.xla.replicas import XLAStrategy

size = int(sys.argv[1])

def place(world, word):
    return [world.rank, world.size, world.local_rank, world.local_size, world.launcher, word]

def fail(world):
    if world.rank == 1:
        raise KeyError("boom")
    import time
    time.sleep(60)  # as in a collective that the other never joins: nothing would wake it

def gather(fabric, word):
    cpu_replicas.mend()
    ranks = fabric.all_gather(fabric.global_rank)
    return {"ranks": ranks.tolist(), "word": word, "objects": fabric.broadcast({"from": fabric.global_rank}, 1)}

if __name__ == "__main__":
    seen = {}
    fabric = Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=size)
    seen["imported"] = "torch_xla" in sys.modules
    seen["places"] = XLA(Topology(num_processes=size)).launch_all(place, "argument")
    try:
        XLA(Topology(num_processes=size)).launch(fail)
    except WorkerError as error:
        seen["error"] = [type(error.cause).__name__, str(error).strip().splitlines()[-1]]
    seen["gathered"] = fabric.launch(gather, "argument")
    import torch_xla
    seen["touched"] = torch_xla._XLAC._xla_runtime_is_initialized()
    torch_xla.device()
    try:
        fabric.launch(gather, "argument")
    except RuntimeError as error:
        seen["refused"] = str(error)
    print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = tmp_path_factory.mktemp("launch") / "program.py"
    program.write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, str(program), str(SIZE)], env=environ, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_results_of_all_replicas_are_returned_in_rank_order(seen: dict[str, Any]) -> None:
    assert seen["places"] == [[rank, SIZE, rank, SIZE, "xla", "argument"] for rank in range(SIZE)]


def test_an_error_of_any_replica_is_raised_at_once(seen: dict[str, Any]) -> None:
    assert seen["error"] == ["KeyError", "KeyError: 'boom'"]


def test_a_launched_function_communicates_with_all_replicas(seen: dict[str, Any]) -> None:
    assert seen["gathered"] == {"ranks": list(range(SIZE)), "word": "argument", "objects": {"from": 1}}


def test_launching_imports_torch_xla_and_touches_devices_in_the_ranks_alone(seen: dict[str, Any]) -> None:
    assert not seen["imported"]
    assert not seen["touched"]


def test_launching_after_a_device_was_touched_is_an_error_and_not_a_hang(seen: dict[str, Any]) -> None:
    assert seen["refused"].startswith("This process has used an XLA device already, and holds them all")


def test_launching_without_a_function_raises_with_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"starts its replicas at a function.* Write `fabric\.launch\(main\)`"):
        XLA(Topology(num_processes=SIZE)).enter()


def test_in_a_world_that_torch_xla_made_launching_needs_no_function(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from fabric import Fabric\n"
        "fabric = Fabric(accelerator='xla', strategy='xla')\n"
        "fabric.launch()\n"
        "print(fabric._configuration.launcher, fabric.device.type, fabric.all_reduce(1.0).item())\n"
    )
    world = {"CLOUD_TPU_TASK_ID": "0", "TPU_PROCESS_ADDRESSES": "127.0.0.1:8476", "CPU_NUM_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, **world}, capture_output=True, text=True, timeout=800
    )
    assert done.stdout == "external xla 1.0\n", done.stderr


@pytest.mark.tpu
def test_on_a_tpu_each_chip_has_a_process() -> None:
    pids = XLA(Topology(num_processes=SIZE)).launch_all(_pid)
    assert len(set(pids)) == len(pids) > 1


def _pid(world: World) -> int:
    assert torch.ones(1, device="xla").item() == 1
    return os.getpid()
