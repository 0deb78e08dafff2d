"""The files in `examples/clusters/`, checked for what can be checked without a cluster; test_slurm.py runs one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from recorded import RECORDED

CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str, "value": str}],
    "resources": {"limits": {"nvidia.com/gpu": int}},
}
REPLICAS = {"replicas": int, "restartPolicy": str, "template": {"spec": {"containers": [CONTAINER]}}}
SPEC = {
    "nprocPerNode": str,
    "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int, "ttlSecondsAfterFinished": int},
    "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
}
JOB = {"apiVersion": str, "kind": str, "metadata": {"name": str, "namespace": str}, "spec": SPEC}
"""The fields of a PyTorchJob that an example may use, and their types; a server refuses a field of another type.

Source: training-operator 1.9, manifests/base/crds/kubeflow.org_pytorchjobs.yaml, and the models of kubeflow-training
1.9.4 and kubernetes 37, compared by hand: installed, these two are 130 MB.
"""
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
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert sum(role["replicas"] for role in roles.values()) == recorded.world.size
    assert recorded.environ["PET_NPROC_PER_NODE"] == str(job["spec"].get("nprocPerNode", 1))


def check(value: Any, kind: Any, at: str) -> None:
    """Raise AssertionError where a value is not of the kind: a field that is unknown, or of another type."""
    if isinstance(kind, dict):
        assert isinstance(value, dict), at
        for name, inner in value.items():
            assert name in kind, f"{at}.{name} is no field"
            check(inner, kind[name], f"{at}.{name}")
    elif isinstance(kind, list):
        assert isinstance(value, list), at
        for inner in value:
            check(inner, kind[0], f"{at}[]")
    else:
        assert type(value) is kind, f"{at}: {value!r} is no {kind.__name__}"


def test_every_field_is_one_of_the_operators_and_of_its_type() -> None:
    text = (FOLDER / "pytorchjob.yaml").read_text()
    check(yaml.safe_load(text), JOB, "job")
    (advice,) = re.findall(r"`(nprocPerNode: .*?)`", text)
    check(yaml.safe_load(advice), SPEC, "job.spec")


def test_every_pod_runs_python_in_the_container_that_the_operator_looks_for() -> None:
    job: dict[str, Any] = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = role["template"]["spec"]["containers"]
        assert (container["name"], container["command"][0]) == ("pytorch", "python")
        assert role["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
