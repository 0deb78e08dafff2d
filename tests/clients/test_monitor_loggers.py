"""The numbers of `fabric.monitor` in W&B, offline, and in MLflow, under the names that all loggers get."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NAMES = {
    *("monitor/step_seconds", "monitor/steps_per_second", "monitor/samples_per_second", "monitor/tokens_per_second"),
    *(f"monitor/{phase}_seconds" for phase in ("data", "forward", "backward", "optimizer", "waiting", "saving")),
    *("monitor/other_seconds", "monitor/flops_per_second", "monitor/mfu", "monitor/loss", "monitor/gradient_norm"),
    *("monitor/learning_rate", "monitor/host_memory_bytes", "monitor/host_memory_peak_bytes"),
}


TRAIN = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.optim import SGD
from fabric import Fabric

def train(logger):
    with Fabric(accelerator="cpu", devices=1, sanitize=False, loggers=logger) as fabric:
        model = nn.Linear(2, 1)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
        monitor = fabric.monitor(window_steps=2, show=False)
        for _ in range(6):
            fabric.backward(model(torch.ones(3, 2)).sum())
            optimizer.step()
            monitor.add(samples=3, tokens=6, gradient_norm=1.0)
    return dict(monitor.latest)
"""
"""Two windows, which end at steps 4 and 6."""

WANDB = """
import wandb
run = wandb.init(mode="offline", dir=sys.argv[1], project="monitor")
latest = train(run)
run.log({"end": 1}, step=7)  # the last step is complete when the next one begins
summary = {name: value for name, value in dict(run.summary).items() if name.startswith("monitor/")}
found = {"latest": latest, "summary": summary}
run.finish()
"""

MLFLOW = """
import mlflow
mlflow.set_tracking_uri(Path(sys.argv[1]).as_uri())
mlflow.set_experiment("monitor")
with mlflow.start_run() as run:
    latest = train(mlflow)
client = mlflow.MlflowClient()
summary = client.get_run(run.info.run_id).data.metrics
history = client.get_metric_history(run.info.run_id, "monitor/loss")
found = {"latest": latest, "summary": dict(summary), "steps": [point.step for point in history]}
"""


def logged(program: str, folder: Path) -> dict[str, Any]:
    """What the program has found; in a process of its own, for these libraries leave threads."""
    file = folder / "found.json"
    program = f"{TRAIN}{program}\nPath({str(file)!r}).write_text(json.dumps(found))\n"
    environ = {**os.environ, "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    ended = subprocess.run(
        [sys.executable, "-c", program, folder], env=environ, cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    assert set(found["summary"]) == NAMES
    assert found["summary"] == {f"monitor/{name}": pytest.approx(each) for name, each in found["latest"].items()}
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wandb_offline_has_the_numbers(tmp_path: Path) -> None:
    logged(WANDB, tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mlflow_has_the_numbers_of_each_window(tmp_path: Path) -> None:
    assert logged(MLFLOW, tmp_path)["steps"] == [4, 6]
