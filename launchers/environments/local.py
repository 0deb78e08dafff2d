"""Ranks set by hand, in the variables RANK, WORLD_SIZE, ..., if no launcher is detected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment, Start
from fabric.launchers.environments.variables import checked, integer, show
from fabric.launchers.world import Rendezvous, World

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@final
class LocalEnvironment(Environment):
    """`RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python script.py`, once per rank.

    Without LOCAL_RANK and LOCAL_WORLD_SIZE all ranks are on one node.
    """

    name = "local"
    start = Start(
        command="RANK=0 WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29500 python train.py, once per rank",
    )

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "RANK" in environ or "WORLD_SIZE" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
        if missing:
            raise ValueError(
                f"The environment has {show(environ, *NAMES)} but no `{missing[0]}`. Set both RANK and WORLD_SIZE on "
                "every rank, or neither."
            )

        def number(name: str, default: int | None = None) -> int:
            return integer(environ, name, default, among="A launch by hand")

        rank, size = number("RANK"), number("WORLD_SIZE")
        if not 0 <= rank < size:
            raise ValueError(f"{show(environ, *NAMES)}: RANK counts from 0 to {size - 1}.")
        if ("LOCAL_RANK" in environ) != ("LOCAL_WORLD_SIZE" in environ):
            raise ValueError(
                f"{show(environ, *NAMES)}: LOCAL_RANK and LOCAL_WORLD_SIZE go together. Set both, or neither where all "
                "ranks are on one node."
            )
        local_rank, local_size = number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", size)
        if not 0 <= local_rank < local_size <= size:
            raise ValueError(
                f"{show(environ, *NAMES)}: LOCAL_RANK counts from 0 to LOCAL_WORLD_SIZE - 1, and a node has at most "
                f"WORLD_SIZE={size} ranks."
            )
        node_rank = number("NODE_RANK", number("GROUP_RANK", rank // local_size))
        if size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(environ):
            raise ValueError(
                f"{show(environ, *NAMES)}: {size} ranks need a place to meet. Set MASTER_ADDR to rank 0's machine and "
                "MASTER_PORT to a free port there, the same on every rank."
            )
        world = World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node_rank,
            num_nodes=max(-(-size // local_size), node_rank + 1),
            rendezvous=Rendezvous(address=environ["MASTER_ADDR"], port=number("MASTER_PORT"), hosted=False)
            if size > 1
            else None,
            launcher=self.name,
        )
        return checked(world, environ, *NAMES)
