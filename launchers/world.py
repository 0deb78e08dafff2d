"""The place of a process in a job: its ranks, the sizes, and the address of the rendezvous.

A `World` is created by a launcher, or read from the environment variables of an external launcher, and never changes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which the processes of a world meet."""

    address: str
    """Host name or address of the store."""
    port: int
    """TCP port of the store."""
    hosted: bool = False
    """Whether another process than rank 0 serves the store there: fabric's supervisor, or torchrun's agent."""
    attempt: int = 0
    """The number of this attempt of the job. Keys of an earlier attempt are never read by a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The place of one process among all.

    `rank` counts over all nodes, `local_rank` within this node, `node_rank` counts the nodes. A world of one
    needs no rendezvous; any other has one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    rendezvous: Rendezvous | None = None
    launcher: str = "inline"
    """The name of the launcher that started this process: inline, script, fork, forkserver, spawn, elastic, or of the
    cluster environment (torchelastic, slurm, ...)."""

    def __post_init__(self) -> None:
        for name, value, bound, of in (
            ("rank", self.rank, self.size, "size"),
            ("local_rank", self.local_rank, self.local_size, "local_size"),
            ("node_rank", self.node_rank, self.num_nodes, "num_nodes"),
        ):
            if not 0 <= value < bound:
                raise ValueError(
                    f"A world with `{name}={value}` and `{of}={bound}`: `{name}` counts from 0 to {bound - 1}."
                )
        if self.local_size > self.size:
            raise ValueError(
                f"A world of `size={self.size}` cannot have `local_size={self.local_size}` processes on one node."
            )
        if self.size > 1 and self.rendezvous is None:
            raise ValueError(f"A world of `size={self.size}` needs a `rendezvous`: the address where its ranks meet.")

    @property
    def place(self) -> tuple[int, ...]:
        """Rank, size, local rank, local size, node rank and number of nodes."""
        return self.rank, self.size, self.local_rank, self.local_size, self.node_rank, self.num_nodes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of all nodes."""
        return self.rank == 0
