"""Ranks that a launcher of fabric started. They have torchrun's variables, so that other tools recognise them."""

from collections.abc import Mapping
from typing import final

from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.environments.torchelastic import PLACE, world_of
from fabric.launchers.world import Rendezvous, World

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
