"""Horovod's variables, in both directions: read from `horovodrun`, and set for Horovod.

A rank of horovodrun meets the others at a store, as all ranks of fabric do; horovodrun's own rendezvous is not used.
Horovod reads its variables from the environment when it starts, so they are set only while it starts.
Source: horovod 0.28.1, runner/gloo_run.py, common/gloo/gloo_context.cc.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import final
from zlib import crc32

from fabric.launchers.environments.defaults import variables
from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.world import Rendezvous, World


@final
class HorovodEnvironment(Environment):
    """`horovodrun --gloo -np 4 python script.py`."""

    name = "horovod"
    looked_for = "HOROVOD_RANK (horovodrun)"
    names = tuple(f"HOROVOD_{of}{what}" for of in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE"))

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "HOROVOD_RANK" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        read = Variables(environ, "horovodrun", self.names)
        num_nodes = read.integer("HOROVOD_CROSS_SIZE")
        if num_nodes * read.integer("HOROVOD_LOCAL_SIZE") != read.integer("HOROVOD_SIZE"):
            raise ValueError(
                f"{read.show()}: nodes have different numbers of ranks, so these variables do not tell the node of "
                "this rank. Give every host the same number of slots."
            )
        return read.world(self.name, _rendezvous(read, num_nodes), *map(read.integer, self.names))


def _rendezvous(read: Variables, num_nodes: int) -> Rendezvous:
    """Rank 0 serves the store, on a port derived from that of horovodrun's own rendezvous, which no other job has."""
    if num_nodes > 1 and "MASTER_ADDR" not in read.environ:
        raise ValueError(
            f"{read.show()}: horovodrun started ranks on {num_nodes} nodes, and tells none of them where rank 0 is. "
            "Write `MASTER_ADDR=HOST horovodrun ...`, HOST being the first of its hosts."
        )
    job = read.text("HOROVOD_GLOO_RENDEZVOUS_ADDR"), read.text("HOROVOD_GLOO_RENDEZVOUS_PORT")
    number = crc32(":".join(job).encode())
    return read.served_by_rank_0(read.environ.get("MASTER_ADDR", "127.0.0.1"), number, attempt=number)


def place_in_environment(
    world: World, *, address: str, port: int, interface: str | None, timeout_seconds: float
) -> AbstractContextManager[None]:
    """Context manager in which Horovod finds the place of this rank and the rendezvous in the environment.

    `address`, `port`: of a server of Horovod's own rendezvous. `interface`: the one gloo listens on, unless
    HOROVOD_GLOO_IFACE or GLOO_SOCKET_IFNAME names another.
    """
    interface = os.environ.get("HOROVOD_GLOO_IFACE", os.environ.get("GLOO_SOCKET_IFNAME", interface))
    place = {
        **dict(zip(HorovodEnvironment.names, map(str, world.place), strict=True)),
        "HOROVOD_HOSTNAME": f"node{world.node_rank}",  # a name that is different for each node, not an address
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(timeout_seconds))),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        **({} if interface is None else {"HOROVOD_GLOO_IFACE": interface}),
    }
    return variables(os.environ, place)
