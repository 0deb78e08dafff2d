"""What each launcher left in the environment of one of its ranks, as literal tables.

Recorded in real runs where the row says so; else written after the launcher's manual. A new environment adds a row.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from fabric.launchers.world import Rendezvous, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The last rank of two nodes with two ranks each, unless the world says otherwise."""

    launcher: str
    source: str
    environ: Mapping[str, str]
    world: World
    rank: str
    """The variable that holds the rank."""
    needed: tuple[str, ...]
    """Variables whose absence is an error, since nothing else tells what they tell."""
    files: Mapping[str, str] | None = None
    """For a variable that names a file: the file's content."""

    def __repr__(self) -> str:
        return self.launcher


def _world(launcher: str, at: Rendezvous, *, local_size: int = 2) -> World:
    return World(
        rank=3,
        size=4,
        local_rank=local_size - 1,
        local_size=local_size,
        node_rank=4 // local_size - 1,
        num_nodes=4 // local_size,
        rendezvous=at,
        launcher=launcher,
    )


RECORDED: tuple[Recorded, ...] = (
    Recorded(
        launcher="script",
        source="`python train.py` on each of two nodes, launcher='script'",
        environ={
            "FABRIC_LAUNCHER": "script",
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "1",
            "OMP_NUM_THREADS": "1",
        },
        world=_world("script", Rendezvous(address="n1", port=29500, hosted=True, attempt=1)),
        rank="RANK",
        needed=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "MASTER_ADDR"),
    ),
    Recorded(
        launcher="torchelastic",
        source="torch 2.13: `torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --max-restarts 1`",
        environ={
            "RANK": "3",
            "GROUP_RANK": "1",
            "ROLE_RANK": "3",
            "ROLE_NAME": "default",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "WORLD_SIZE": "4",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "4",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "40201",
            "TORCHELASTIC_RESTART_COUNT": "1",
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "TORCHELASTIC_RUN_ID": "5246f96b-a0ae-4683-9295-b8c5c561aff3",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_8uwo9wps/5246f96b_av1kyq2i/attempt_1/1/error.json",
        },
        world=_world("torchelastic", Rendezvous(address="n1", port=40201, hosted=True, attempt=1)),
        rank="RANK",
        needed=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "MASTER_ADDR"),
    ),
    Recorded(
        launcher="slurm",
        source="SLURM 22.05: `sbatch -N2 --ntasks-per-node=2`, then `srun`, after one requeue",
        environ={
            "SLURMD_NODENAME": "n2",
            "SLURM_JOB_ID": "5",
            "SLURM_JOB_NAME": "interactive",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_LAUNCH_NODE_IPADDR": "10.78.0.1",
            "SLURM_LOCALID": "1",
            "SLURM_NNODES": "2",
            "SLURM_NODEID": "1",
            "SLURM_NTASKS": "4",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_PROCID": "3",
            "SLURM_RESTART_COUNT": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_TASKS_PER_NODE": "2(x2)",
        },
        world=_world("slurm", Rendezvous(address="n1", port=15_035, hosted=False, attempt=1)),
        rank="SLURM_PROCID",
        needed=(
            "SLURM_JOB_ID",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_NUM_NODES",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_TASKS_PER_NODE",
        ),
    ),
    Recorded(
        launcher="lsf",
        source="IBM's manuals: `bsub -nnodes 2`, then `jsrun -n 4 -r 2`",
        environ={
            "LSB_JOBID": "5",
            "LSB_DJOB_RANKFILE": "(a file)",
            "JSM_NAMESPACE_RANK": "3",
            "JSM_NAMESPACE_SIZE": "4",
            "JSM_NAMESPACE_LOCAL_RANK": "1",
            "JSM_NAMESPACE_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_RANK": "3",
        },
        files={"LSB_DJOB_RANKFILE": f"batch5\nn1\nn1\n{socket.gethostname()}\n{socket.gethostname()}\n"},
        world=_world("lsf", Rendezvous(address="n1", port=15_035, hosted=False)),
        rank="JSM_NAMESPACE_RANK",
        needed=(
            "LSB_JOBID",
            "LSB_DJOB_RANKFILE",
            "JSM_NAMESPACE_SIZE",
            "JSM_NAMESPACE_LOCAL_RANK",
            "JSM_NAMESPACE_LOCAL_SIZE",
        ),
    ),
    Recorded(
        launcher="mpi",
        source="Open MPI 5.0.11: `mpirun --host n1:2,n2:2 -x MASTER_ADDR=n1`",
        environ={
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_NODE_RANK": "1",
            "PMIX_RANK": "3",
            "PMIX_NAMESPACE": "prterun-n1-29480@1",
            "MASTER_ADDR": "n1",
        },
        world=_world("mpi", Rendezvous(address="n1", port=18_598, hosted=False, attempt=684250514)),
        rank="OMPI_COMM_WORLD_RANK",
        needed=(
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            "MASTER_ADDR",
        ),
    ),
    Recorded(
        launcher="kubeflow",
        source="the training operator's sources: a `PyTorchJob` with one master and three workers",
        environ={
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_PORT": "tcp://10.96.0.1:443",
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": "train-master-0",
            "MASTER_PORT": "23456",
            "RANK": "3",
            "WORLD_SIZE": "4",
            "PET_NPROC_PER_NODE": "1",
            "PET_NNODES": "4",
            "PET_NODE_RANK": "3",
            "PET_MASTER_ADDR": "train-master-0",
            "PET_MASTER_PORT": "23456",
        },
        world=_world("kubeflow", Rendezvous(address="train-master-0", port=23456, hosted=False), local_size=1),
        rank="RANK",
        needed=("RANK", "MASTER_ADDR", "MASTER_PORT"),
    ),
    Recorded(
        launcher="horovod",
        source="horovod 0.28.1: `horovodrun --gloo -np 4 -H n1:2,n2:2`",
        environ={
            "HOROVOD_RANK": "3",
            "HOROVOD_SIZE": "4",
            "HOROVOD_LOCAL_RANK": "1",
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": "1",
            "HOROVOD_CROSS_SIZE": "2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.78.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "41234",
            "HOROVOD_CONTROLLER": "gloo",
            "MASTER_ADDR": "n1",
        },
        world=_world("horovod", Rendezvous(address="n1", port=24_332, hosted=False, attempt=1685268476)),
        rank="HOROVOD_RANK",
        needed=(
            "HOROVOD_SIZE",
            "HOROVOD_LOCAL_RANK",
            "HOROVOD_LOCAL_SIZE",
            "HOROVOD_CROSS_RANK",
            "HOROVOD_CROSS_SIZE",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR",
            "MASTER_ADDR",
        ),
    ),
    Recorded(
        launcher="xla",
        source="torch_xla's sources: `torch_xla.launch` on two hosts of a TPU with two chips each",
        environ={
            "PJRT_DEVICE": "TPU",
            "PJRT_LOCAL_PROCESS_RANK": "1",
            "PJRT_LOCAL_PROCESS_COUNT": "2",
            "CLOUD_TPU_TASK_ID": "3",
            "TPU_PROCESS_ADDRESSES": "n1:8476,n1:8477,n2:8476,n2:8477",
            "TPU_VISIBLE_CHIPS": "1",
        },
        world=_world("xla", Rendezvous(address="n1", port=12355, hosted=False)),
        rank="CLOUD_TPU_TASK_ID",
        needed=("CLOUD_TPU_TASK_ID", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT", "TPU_PROCESS_ADDRESSES"),
    ),
    Recorded(
        launcher="local",
        source="by hand",
        environ={
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "29500",
        },
        world=_world("local", Rendezvous(address="n1", port=29500, hosted=False)),
        rank="RANK",
        needed=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ),
)
