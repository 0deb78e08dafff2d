"""Ranks with the variables of torchrun: those of torchrun, whose agent has chosen the ranks and serves the store, and
those that a launcher of fabric started: other tools then recognise them.
"""

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


MARK = "FABRIC_LAUNCHER"
"""The name of fabric's launcher, set in its ranks only."""

OWNER = "FABRIC_RANK_PID"
"""The process id of the rank: its children inherit its variables, and are not ranks."""


@final
class OursEnvironment(Environment):
    """A rank of a launch of fabric."""

    name = "fabric"
    names = (MARK, *PLACE)

    def detect(self, environ: Mapping[str, str]) -> bool:
        return MARK in environ

    def world(self, environ: Mapping[str, str]) -> World:
        launcher = environ[MARK]
        return world_of(Variables(environ, f"`launcher={launcher!r}`", self.names), launcher)


def variables_of(world: World, environ: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """The variables of a rank beyond those of the supervisor (`environ`), which are not changed.

    The ranks of a node share its cores, unless OMP_NUM_THREADS says otherwise. Ranks of one node talk over loopback,
    unless GLOO_SOCKET_IFNAME says otherwise.
    """
    at = world.rendezvous or Rendezvous(address="127.0.0.1", port=0, hosted=True)
    variables = {
        MARK: world.launcher,
        "PYTHONHASHSEED": environ.get("PYTHONHASHSEED") or "0",  # one on all ranks: the order of a set of strings
        **dict(zip(PLACE, map(str, world.place), strict=True)),
        "MASTER_ADDR": at.address,
        "MASTER_PORT": str(at.port),
        # As torchrun sets it if the store is served outside the ranks: `init_process_group("gloo")` then joins it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(at.attempt),
    }
    if not environ.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores // world.local_size))
    return variables
