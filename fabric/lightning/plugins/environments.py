"""Cluster environments. They are detected automatically; passing one requires it."""

from typing import Any

from fabric.launchers.environments.environment import Environment
from fabric.launchers.environments.kubeflow import KubeflowEnvironment as KubeflowEnvironment
from fabric.launchers.environments.lsf import LSFEnvironment as LSFEnvironment
from fabric.launchers.environments.mpi import MPIEnvironment as MPIEnvironment
from fabric.launchers.environments.slurm import SlurmEnvironment
from fabric.launchers.environments.torchelastic import TorchElasticEnvironment as TorchElasticEnvironment
from fabric.launchers.environments.xla import XLAEnvironment as XLAEnvironment
from fabric.lightning.unsupported import unsupported

ClusterEnvironment = Environment
SLURMEnvironment = SlurmEnvironment


class LightningEnvironment:
    """Lightning Fabric starts processes itself with it. Here an external launcher always determines the world."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise unsupported(
            "LightningEnvironment()",
            "Leave it out: without an external launcher the ranks are started here. Within a job whose variables are "
            "to be ignored, unset them for the program: `env -u SLURM_PROCID -u SLURM_STEP_ID python train.py`.",
        )
