"""Ranks of srun: one process per task of a job step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment
from fabric.launchers.environments.variables import integer, show
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
    "SLURM_STEP_TASKS_PER_NODE",
)
FIRST_PORT, NUM_PORTS = 15_000, 10_000
"""The rendezvous port is taken from the job's number: steps of two jobs on one node do not meet."""


@final
class SlurmEnvironment(Environment):
    """`srun python script.py`. The batch script's own shell, and that of `salloc` or `srun --pty bash`, is no rank."""

    @property
    def name(self) -> str:
        return "slurm"

    def detect(self, environ: Mapping[str, str]) -> bool:
        # An sbatch script has a SLURM_PROCID of its own, but no step; an interactive shell is a step that runs bash.
        return (
            "SLURM_PROCID" in environ
            and "SLURM_STEP_ID" in environ
            and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")
        )

    def world(self, environ: Mapping[str, str]) -> World:
        def number(name: str, default: int | None = None) -> int:
            return integer(environ, name, default, among="srun")

        size = number("SLURM_STEP_NUM_TASKS", integer(environ, "SLURM_NTASKS", 1, among="srun"))
        num_nodes = number("SLURM_STEP_NUM_NODES", number("SLURM_NNODES", 1))
        rank, node_rank, local_rank = number("SLURM_PROCID"), number("SLURM_NODEID"), number("SLURM_LOCALID")
        local_size = _tasks_on_node(environ, node_rank, num_nodes, size)
        if not (0 <= rank < size and 0 <= node_rank < num_nodes and 0 <= local_rank < local_size <= size):
            raise ValueError(
                f"{show(environ, *NAMES)}: these contradict each other. Start the ranks with `srun`, and leave its "
                "variables as they are."
            )
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            rendezvous=_rendezvous(environ, num_nodes) if size > 1 else None,
            launcher=self.name,
        )


def _tasks_on_node(environ: Mapping[str, str], node_rank: int, num_nodes: int, size: int) -> int:
    """Ranks on this node, out of SLURM's short form: `2(x3),1` is 2, 2, 2, 1."""
    word = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    if word is None:
        return size // num_nodes
    counts: list[int] = []
    for part in word.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={word} is not of SLURM's form, such as `2(x3),1`.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != num_nodes or sum(counts) != size:
        raise ValueError(
            f"{show(environ, *NAMES)}: {word} adds up to {sum(counts)} ranks on {len(counts)} nodes, not to {size} on "
            f"{num_nodes}. Leave srun's variables as they are."
        )
    return counts[node_rank]


def _rendezvous(environ: Mapping[str, str], num_nodes: int) -> Rendezvous:
    """Rank 0 serves the store on the first node of the step."""
    job, step = (integer(environ, name, among="srun") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = FIRST_PORT + (job * 7 + step) % NUM_PORTS
    return Rendezvous(
        address=environ.get("MASTER_ADDR") or _first_host(environ, num_nodes),
        port=integer(environ, "MASTER_PORT", port, among="A job script"),
        hosted=False,
    )


def _first_host(environ: Mapping[str, str], num_nodes: int) -> str:
    """The first name in a host list: `a[3-5,9],b` begins with `a3`."""
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "")))
    if num_nodes == 1 or not hosts:
        return "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", hosts)
    assert match is not None
    return match[1] + (match[2] or "") + (match[3] or "")
