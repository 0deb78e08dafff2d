"""The files in `examples/clusters/`, checked for what can be checked without a cluster; test_slurm.py runs one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml
from clusters.recorded import RECORDED

FOLDER = Path(__file__).parents[2] / "examples" / "clusters"


def test_the_batch_script_is_one_that_bash_can_read() -> None:
    done = subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_pods_of_the_job_are_the_world_of_the_recorded_one() -> None:
    job: dict[str, Any] = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    (recorded,) = (one for one in RECORDED if one.launcher == "kubeflow")
    assert (set(roles), roles["Master"]["replicas"]) == ({"Master", "Worker"}, 1)
    assert sum(role["replicas"] for role in roles.values()) == recorded.world.size
    assert recorded.environ["PET_NPROC_PER_NODE"] == str(job["spec"].get("nprocPerNode", 1))


def test_every_pod_runs_python_in_the_container_that_the_operator_looks_for() -> None:
    job: dict[str, Any] = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = role["template"]["spec"]["containers"]
        assert (container["name"], container["command"][0]) == ("pytorch", "python")
        assert role["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
