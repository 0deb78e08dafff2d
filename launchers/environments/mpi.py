"""Ranks of mpirun: Open MPI's own, or Hydra's (MPICH, Intel MPI), with or without mpi4py in the script.

mpirun sets a rank's numbers, but neither its node nor the host of rank 0. The node is computed from the ranks, which
are consecutive on a node by default; with several nodes, the host has to be passed. MPI itself is not used: a rank that
has initialised it and then raises keeps the others waiting.
Source: "Environment variables for your MPI application", open-mpi.org; OMPI_COMM_WORLD_NODE_RANK counts processes.
"""

from collections.abc import Mapping
from typing import final
from zlib import crc32

from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.world import Rendezvous, World

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""For each of the two: rank, size, local rank, local size."""


@final
class MPIEnvironment(Environment):
    """`mpirun -np 4 python script.py`."""

    name = "mpi"
    looked_for = "OMPI_COMM_WORLD_RANK (mpirun)"
    names = OPEN_MPI + HYDRA

    def detect(self, environ: Mapping[str, str]) -> bool:
        # srun sets PMI_RANK, and jsrun Open MPI's variables, for programs that initialise MPI.
        by_open_mpi = OPEN_MPI[0] in environ and "JSM_NAMESPACE_RANK" not in environ
        return by_open_mpi or {"PMI_RANK", "MPI_LOCALRANKID"} <= set(environ)

    def world(self, environ: Mapping[str, str]) -> World:
        read = Variables(environ, "mpirun", OPEN_MPI if OPEN_MPI[0] in environ else HYDRA)
        rank, size, local_rank, local_size = map(read.integer, read.names)
        num_nodes = -(-size // max(local_size, 1))
        in_a_row = size % max(local_size, 1) == 0 and local_rank == rank % max(local_size, 1)
        if num_nodes > 1 and 0 <= rank < size and not in_a_row:
            raise ValueError(
                f"{read.show()}: the node of this rank cannot be computed from these variables. Give every node the "
                "same number of ranks, one after another: `mpirun --map-by slot` (Hydra: `-ppn`)."
            )
        at = _rendezvous(read, num_nodes) if size > 1 else None
        node_rank = rank // max(local_size, 1)
        return read.world(self.name, at, rank, size, local_rank, local_size, node_rank, num_nodes)


def _rendezvous(read: Variables, num_nodes: int) -> Rendezvous:
    """Rank 0 serves the store, on a port derived from the job's name, under keys with that name."""
    environ = read.environ
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if num_nodes == 1 else None)
    job = environ.get("PMIX_NAMESPACE", environ.get("MASTER_PORT"))
    if not address or not job:
        raise ValueError(
            f"{read.show()}: mpirun does not tell its ranks where they meet, and "
            f"`{'MASTER_PORT' if address else 'MASTER_ADDR'}` is not set. Pass both on, HOST being that of rank 0: "
            "`mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500` (Hydra: `-genv MASTER_ADDR HOST -genv MASTER_PORT "
            "29500`)."
        )
    number = crc32(job.encode())
    return read.served_by_rank_0(address, number, attempt=number)
