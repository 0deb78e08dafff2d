"""Ranks of torchrun: its agent has chosen the ranks, and serves the store."""

from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.world import Rendezvous, World

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@final
class TorchElasticEnvironment(Environment):
    """`torchrun script.py`, also inside a SLURM job."""

    name = "torchelastic"
    names = PLACE
    looked_for = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun, or by hand)"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "TORCHELASTIC_RUN_ID" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        return world_of(Variables(environ, "torchrun", self.names), self.name)


def world_of(read: Variables, launcher: str) -> World:
    """The world in torchrun's variables."""
    at = Rendezvous(
        address=read.text("MASTER_ADDR"),
        port=read.integer("MASTER_PORT"),
        hosted=read.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        attempt=read.integer("TORCHELASTIC_RESTART_COUNT", 0),
    )
    return read.world(launcher, at, *map(read.integer, PLACE))
