"""Ranks of srun: one process per task of a job step.

An interactive shell of SLURM is no rank, although it has the variables of one. The job's name does not distinguish
them: `srun bash train.sh` and `salloc` followed by `srun` have the name of a shell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment, Start
from fabric.launchers.environments.host_list import HostList
from fabric.launchers.environments.variables import integer, port_of_job, show, text, world_from
from fabric.launchers.world import Rendezvous, World

NAMES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)
INTERACTIVE_STEP = str(0xFFFFFFFA)
"""The step in which `salloc` runs its shell on a cluster with `use_interactive_step`. Source: slurm.h."""
OF_MPI = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Set by mpirun (Open MPI; Hydra), which starts its daemons by srun: the step is then the daemons', one a node."""


@final
class SlurmEnvironment(Environment):
    """`srun python script.py`. The batch script's own shell, and that of `salloc` or `srun --pty bash`, is no rank."""

    name = "slurm"
    start = Start(
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
    )
    looked_for = "SLURM_PROCID and SLURM_STEP_ID (srun)"
    telling = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NNODES"

    def detect(self, environ: Mapping[str, str]) -> bool:
        # A batch script has a SLURM_PROCID of its own, but no step. An interactive shell is a step of one task.
        if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(environ) or any(name in environ for name in OF_MPI):
            return False
        is_interactive = environ["SLURM_STEP_ID"] == INTERACTIVE_STEP or "SLURM_PTY_PORT" in environ
        return not (is_interactive and environ.get("SLURM_STEP_NUM_TASKS") == "1")

    def world(self, environ: Mapping[str, str]) -> World:
        def number(name: str) -> int:
            return integer(environ, name, among="srun")

        size, num_nodes = number("SLURM_STEP_NUM_TASKS"), number("SLURM_STEP_NUM_NODES")
        node_rank = number("SLURM_NODEID")
        return world_from(
            environ,
            *NAMES,
            launcher=self.name,
            rank=number("SLURM_PROCID"),
            size=size,
            local_rank=number("SLURM_LOCALID"),
            local_size=_tasks_on_node(environ, node_rank, num_nodes, size),
            node_rank=node_rank,
            num_nodes=num_nodes,
            rendezvous=_rendezvous(environ, num_nodes),
            start="`srun`",
        )


def _tasks_on_node(environ: Mapping[str, str], node_rank: int, num_nodes: int, size: int) -> int:
    """Ranks per node, from SLURM's short form: `2(x3),1` is 2, 2, 2, 1."""
    word = text(environ, "SLURM_STEP_TASKS_PER_NODE", among="srun")
    counts: list[int] = []
    for part in word.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"`SLURM_STEP_TASKS_PER_NODE={word}` is not of SLURM's form, such as `2(x3),1`.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != num_nodes or sum(counts) != size:
        raise ValueError(
            f"{show(environ, *NAMES)}: {word} adds up to {sum(counts)} ranks on {len(counts)} nodes, not to {size} on "
            f"{num_nodes}. Leave srun's variables as they are."
        )
    return counts[node_rank] if 0 <= node_rank < num_nodes else 1


def _rendezvous(environ: Mapping[str, str], num_nodes: int) -> Rendezvous:
    """Rank 0 serves the store on the first node of the step."""
    job, step = (integer(environ, name, among="srun") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Rendezvous(
        address=environ.get("MASTER_ADDR") or _first_host(environ, num_nodes),
        port=port_of_job(environ, job, step, among="A job script"),
        hosted=False,
        attempt=integer(environ, "SLURM_RESTART_COUNT", 0, among="SLURM"),
    )


def _first_host(environ: Mapping[str, str], num_nodes: int) -> str:
    if num_nodes == 1:
        return "127.0.0.1"
    word = text(environ, "SLURM_STEP_NODELIST", among="srun")
    hosts = HostList.parse(word)
    if hosts.num_hosts != num_nodes:
        raise ValueError(
            f"{show(environ, *NAMES)}: {word} names {hosts.num_hosts} hosts, not {num_nodes}. Leave srun's variables "
            "as they are."
        )
    return hosts.first
