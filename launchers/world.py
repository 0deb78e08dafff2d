"""Who a process is among the processes of one job: its ranks, the sizes, and where they meet.

A `World` is made by a launcher, or read from the environment that an external launcher left, and never changes.
Knows numbers and an address; knows no tensor and no strategy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the processes of a world find each other."""

    address: str
    """Host name or address of the store."""
    port: int
    """TCP port of the store."""
    hosted: bool
    """True: somebody else serves the store there (our supervisor, torchrun's agent). False: rank 0 must serve it."""
    attempt: int = 0
    """Which start of the same job this is. Keys of an earlier attempt are never read by a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process's place among all.

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
    """The word of the launcher that made this process: inline, script, fork, forkserver, spawn, elastic, or the name of
    the cluster environment (torchelastic, slurm, ...) when something else did."""

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
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of all nodes."""
        return self.rank == 0
