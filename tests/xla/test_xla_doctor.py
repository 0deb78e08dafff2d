"""What `fabric doctor` says where torch_xla is installed: what runs on its devices, or what to write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SIZE = int(os.environ["CPU_NUM_DEVICES"])
ON_XLA = {"single_xla", "xla", "xla_fsdp"}


def report(**environ: str) -> dict[str, Any]:
    """What it says in a fresh process, with these variables alone about PJRT."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PJRT_")}
    command = [sys.executable, "-m", "fabric", "doctor", "--json"]
    done = subprocess.run(command, env={**kept, **environ}, capture_output=True, text=True, check=True, timeout=800)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_accelerator_lists_its_devices_and_strategies() -> None:
    found = report(PJRT_DEVICE="CPU")
    (row,) = (row for row in found["accelerators"] if row["name"] == "xla")
    assert (row["devices"], row["why_not"]) == (SIZE, None)
    assert {row["name"] for row in found["strategies"] if "xla" in row["runs_on"]} == ON_XLA
    (mesh,) = (row for row in found["strategies"] if row["name"] == "model_parallel")
    assert "Write `strategy=ModelParallelStrategy(parallelize_fn=function, tensor=2)`" in mesh["why_not"]


def test_without_a_client_it_says_which_variable_to_set() -> None:
    found = report()
    (row,) = (row for row in found["accelerators"] if row["name"] == "xla")
    assert row["why_not"].startswith("PJRT_DEVICE is not set. Set `PJRT_DEVICE=TPU`, or `PJRT_DEVICE=CPU` to run XLA")
    here = {row["name"]: row for row in found["strategies"]}
    assert here["ddp"]["runs_on"] == ["cpu"]
    for name in ("single_xla", "xla", "xla_fsdp"):
        assert here[name]["runs_on"] == []
        assert "Set `PJRT_DEVICE=TPU` (or CPU, to run XLA on the processor)" in here[name]["why_not"]
