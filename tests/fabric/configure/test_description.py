"""`run.json`: what a run was given, and what its machine can run."""

import json
import os
from pathlib import Path

from fabric.configure.description import describe
from fabric.configure.explain import configure
from fabric.configure.request import Request


def test_the_settings_of_a_run_and_the_doctor_of_its_machine_are_written_down(tmp_path: Path) -> None:
    request = Request.build({"accelerator": "cpu", "devices": 2, "strategy": "ddp"}, {})
    describe(tmp_path / "run", configure(request, {"OMP_NUM_THREADS": "1"}))
    assert os.listdir(tmp_path / "run") == ["run.json"]
    run = json.loads((tmp_path / "run/run.json").read_text())
    sources = {setting["name"]: (setting["value"], setting["source"]) for setting in run["settings"]}
    assert sources["devices"] == ("0, 1", "argument")
    assert sources["OMP_NUM_THREADS"] == ("1", "environment variable")
    (strategy,) = run["doctor"]["strategies"]
    assert (strategy["name"], strategy["why_not"]) == ("DDPStrategy", None)
    assert "bf16-mixed" in strategy["precisions"]["cpu"]
    assert {"name": "cpu", "devices": 1, "why_not": None} in run["doctor"]["accelerators"]
