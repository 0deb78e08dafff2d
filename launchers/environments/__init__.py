"""The cluster environments, in the order in which they are detected.

The order is from the innermost launcher to the outermost: a rank of fabric may run under torchrun's variables, torchrun
inside a SLURM job, and the ranks of all have the plain variables that `local` reads.
"""

import os
from collections.abc import Mapping

from fabric.launchers.environments.environment import Environment as Environment
from fabric.launchers.environments.horovod import HorovodEnvironment
from fabric.launchers.environments.kubeflow import KubeflowEnvironment
from fabric.launchers.environments.local import LocalEnvironment
from fabric.launchers.environments.lsf import LSFEnvironment
from fabric.launchers.environments.mpi import MPIEnvironment
from fabric.launchers.environments.slurm import SlurmEnvironment
from fabric.launchers.environments.torchelastic import OWNER, OursEnvironment, TorchElasticEnvironment
from fabric.launchers.environments.xla import XLAEnvironment
from fabric.launchers.world import World

ENVIRONMENTS: tuple[Environment, ...] = (
    OursEnvironment(),
    TorchElasticEnvironment(),
    SlurmEnvironment(),
    LSFEnvironment(),
    MPIEnvironment(),
    KubeflowEnvironment(),
    HorovodEnvironment(),
    XLAEnvironment(),
    LocalEnvironment(),
)


def detect_world(environ: Mapping[str, str], *, inherited: bool = False) -> World | None:
    """The world in the variables of a launcher; None if this process is no rank.

    `inherited`: whether a child of a rank that fabric started counts as that rank.
    Raises: ValueError: the variables are incomplete, or contradict each other.
    """
    own_pid = str(os.getpid())
    if not inherited and environ.get(OWNER, own_pid) != own_pid:
        return None
    for environment in ENVIRONMENTS:
        if environment.detect(environ):
            return environment.world(environ)
    return None
