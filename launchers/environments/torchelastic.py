"""Ranks of torchrun: its agent has chosen the ranks, and serves the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment
from fabric.launchers.environments.variables import integer
from fabric.launchers.world import Rendezvous, World


@final
class TorchElasticEnvironment(Environment):
    """`torchrun script.py`, also inside a SLURM job."""

    @property
    def name(self) -> str:
        return "torchelastic"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "TORCHELASTIC_RUN_ID" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        def number(name: str, default: int | None = None) -> int:
            return integer(environ, name, default, among="torchrun")

        size, local_size = number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE")
        node_rank = number("GROUP_RANK", 0)
        rendezvous = Rendezvous(
            address=environ.get("MASTER_ADDR", "127.0.0.1"),
            port=number("MASTER_PORT"),
            hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
            attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        )
        return World(
            rank=number("RANK"),
            size=size,
            local_rank=number("LOCAL_RANK"),
            local_size=local_size,
            node_rank=node_rank,
            num_nodes=number("GROUP_WORLD_SIZE", max(node_rank + 1, -(-size // local_size))),
            rendezvous=rendezvous if size > 1 else None,
            launcher=self.name,
        )
