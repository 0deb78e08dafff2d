"""Ranks of torchrun: its agent has chosen the ranks, and serves the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment, Start
from fabric.launchers.environments.variables import integer, text, world_from
from fabric.launchers.world import Rendezvous, World

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@final
class TorchElasticEnvironment(Environment):
    """`torchrun script.py`, also inside a SLURM job."""

    name = "torchelastic"
    start = Start(
        command="torchrun --nproc-per-node 2 train.py",
        program="torchrun",
        otherwise="`pip install --force-reinstall --no-deps torch` brings it",
    )
    looked_for = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun, or by hand)"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "TORCHELASTIC_RUN_ID" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        def number(name: str) -> int:
            return integer(environ, name, among="torchrun")

        return world_from(
            environ,
            *NAMES,
            launcher=self.name,
            rank=number("RANK"),
            size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK"),
            local_size=number("LOCAL_WORLD_SIZE"),
            node_rank=number("GROUP_RANK"),
            num_nodes=number("GROUP_WORLD_SIZE"),
            rendezvous=Rendezvous(
                address=text(environ, "MASTER_ADDR", among="torchrun"),
                port=number("MASTER_PORT"),
                hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
                attempt=integer(environ, "TORCHELASTIC_RESTART_COUNT", 0, among="torchrun"),
            ),
            start="`torchrun`",
        )
