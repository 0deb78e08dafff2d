"""Ranks of srun: one process per task of a job step.

An interactive shell of SLURM is no rank, although it has the variables of one. The job's name does not distinguish
them: `srun bash train.sh` and `salloc` followed by `srun` have the name of a shell.
"""

import re
from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.world import World

_OF_JOB = "JOB_ID", "PROCID", "LOCALID", "NODEID", "NTASKS", "NNODES"
_OF_STEP = "STEP_ID", "STEP_NUM_TASKS", "STEP_NUM_NODES", "STEP_NODELIST", "STEP_TASKS_PER_NODE"
INTERACTIVE_STEP = str(0xFFFFFFFA)
"""The step in which `salloc` runs its shell on a cluster with `use_interactive_step`. Source: slurm.h."""
OF_MPI = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Set by mpirun (Open MPI; Hydra), which starts its daemons by srun: the step is then the daemons', one a node."""


@final
class SlurmEnvironment(Environment):
    """`srun python script.py`. The batch script's own shell, and that of `salloc` or `srun --pty bash`, is no rank."""

    name = "slurm"
    looked_for = "SLURM_PROCID and SLURM_STEP_ID (srun)"
    names = tuple(f"SLURM_{word}" for word in (*_OF_JOB, *_OF_STEP))

    def detect(self, environ: Mapping[str, str]) -> bool:
        # A batch script has a SLURM_PROCID of its own, but no step. An interactive shell is a step of one task.
        if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(environ) or any(name in environ for name in OF_MPI):
            return False
        is_interactive = environ["SLURM_STEP_ID"] == INTERACTIVE_STEP or "SLURM_PTY_PORT" in environ
        return not (is_interactive and environ.get("SLURM_STEP_NUM_TASKS") == "1")

    def world(self, environ: Mapping[str, str]) -> World:
        read = Variables(environ, "srun", self.names)
        size, num_nodes = read.integer("SLURM_STEP_NUM_TASKS"), read.integer("SLURM_STEP_NUM_NODES")
        node_rank = read.integer("SLURM_NODEID")
        job, step = read.integer("SLURM_JOB_ID"), read.integer("SLURM_STEP_ID")
        address = environ.get("MASTER_ADDR") or _first_host(read, num_nodes)
        at = read.served_by_rank_0(address, job, step=step, attempt=read.integer("SLURM_RESTART_COUNT", 0))
        rank, local_rank = read.integer("SLURM_PROCID"), read.integer("SLURM_LOCALID")
        local_size = _tasks_on_node(read, node_rank, num_nodes, size)
        return read.world(self.name, at, rank, size, local_rank, local_size, node_rank, num_nodes)


def _tasks_on_node(read: Variables, node_rank: int, num_nodes: int, size: int) -> int:
    """Ranks per node, from SLURM's short form: `2(x3),1` is 2, 2, 2, 1."""
    word = read.text("SLURM_STEP_TASKS_PER_NODE")
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", word) for _ in range(int(times or 1))]
    if len(counts) != num_nodes or sum(counts) != size:
        raise ValueError(
            f"{read.show()}: {word} adds up to {sum(counts)} ranks on {len(counts)} nodes, not to {size} on "
            f"{num_nodes}. Leave srun's variables as they are."
        )
    return counts[node_rank] if 0 <= node_rank < num_nodes else 1


def _first_host(read: Variables, num_nodes: int) -> str:
    return "127.0.0.1" if num_nodes == 1 else first_host(read.text("SLURM_STEP_NODELIST"))


def first_host(nodes: str) -> str:
    """The first of the hosts in SLURM's short form: `n1-ib0` of `n[1-2]-ib[0-1],login`."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]
