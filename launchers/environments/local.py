"""Ranks set by hand, in the variables RANK, WORLD_SIZE, ..., if no launcher is detected."""

from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.world import Rendezvous, World


@final
class LocalEnvironment(Environment):
    """`RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python script.py`, once per rank.

    Without LOCAL_RANK and LOCAL_WORLD_SIZE all ranks are on one node.
    """

    name = "local"
    names = (*Environment.names, "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "RANK" in environ or "WORLD_SIZE" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        found = " ".join(name for name in self.names if name in environ)
        read = Variables(
            environ, "A launch by hand", self.names, f"; or, if no launch by hand is meant, `unset {found}`"
        )
        rank, size = read.integer("RANK"), read.integer("WORLD_SIZE")
        if ("LOCAL_RANK" in environ) != ("LOCAL_WORLD_SIZE" in environ):
            raise ValueError(
                f"{read.show()}: LOCAL_RANK and LOCAL_WORLD_SIZE go together. Set both, or neither where all ranks are "
                "on one node."
            )
        local_rank, local_size = read.integer("LOCAL_RANK", rank), read.integer("LOCAL_WORLD_SIZE", size)
        node_rank = read.integer("NODE_RANK", read.integer("GROUP_RANK", rank // max(local_size, 1)))
        at = None
        if size > 1:
            at = Rendezvous(address=read.text("MASTER_ADDR"), port=read.integer("MASTER_PORT"))
        num_nodes = max(-(-size // max(local_size, 1)), node_rank + 1)
        return read.world(self.name, at, rank, size, local_rank, local_size, node_rank, num_nodes)
