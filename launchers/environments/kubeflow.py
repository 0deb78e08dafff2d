"""Ranks of Kubeflow's training operator: one process in each pod of a `PyTorchJob`.

The operator sets the plain RANK and WORLD_SIZE, but a pod is a machine of its own: nothing is shared between two of
them. It sets torchrun's own options too (PET_...), for pods that run torchrun; those are torchrun's ranks, not these.
Written after the operator's sources; it has not run on a real cluster yet.
Source: kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go.
"""

from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.world import Rendezvous, World


@final
class KubeflowEnvironment(Environment):
    """`python script.py` as the command of every pod of a `PyTorchJob`."""

    name = "kubeflow"
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")

    def detect(self, environ: Mapping[str, str]) -> bool:
        # LOCAL_RANK is set by launchers that start several ranks on a machine, never by the operator.
        in_a_pod = "KUBERNETES_SERVICE_HOST" in environ and "LOCAL_RANK" not in environ
        return in_a_pod and ("WORLD_SIZE" in environ or environ.get("PET_NNODES", "1") != "1")

    def world(self, environ: Mapping[str, str]) -> World:
        read = Variables(environ, "Kubeflow's operator", self.names)
        if environ.get("PET_NPROC_PER_NODE", "1") != "1" or "WORLD_SIZE" not in environ:
            raise ValueError(
                f"{read.show()}: Kubeflow wrote this for torchrun, but the pod's command runs Python itself, which "
                "would be one rank alone. Write `torchrun` in the place of `python` in the command."
            )
        rank, size = read.integer("RANK"), read.integer("WORLD_SIZE")
        at = Rendezvous(address=read.text("MASTER_ADDR"), port=read.integer("MASTER_PORT"))
        local_rank, local_size = 0, 1
        return read.world(self.name, at, rank, size, local_rank, local_size, rank, size)
