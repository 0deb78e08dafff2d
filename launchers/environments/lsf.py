"""Ranks of jsrun in an LSF job: one process per task of a resource set.

jsrun sets a rank's numbers; the hosts are in the job's rank file, whose first line is the launch node, where the job
script runs but no rank. Written after IBM's manuals; it has not run on a real cluster yet.
Source: IBM Spectrum LSF, "LSB_DJOB_RANKFILE"; IBM Job Step Manager, "Environment variables available to tasks".
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import final

from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.world import World

PLACE = "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"


@final
class LSFEnvironment(Environment):
    """`jsrun -n 4 python script.py`, within a job of `bsub`."""

    name = "lsf"
    looked_for = "JSM_NAMESPACE_RANK (jsrun)"
    names = ("LSB_JOBID", "LSB_DJOB_RANKFILE", *PLACE)

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "JSM_NAMESPACE_RANK" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        read = Variables(environ, "jsrun", self.names)
        hosts = _compute_hosts(read)
        at = read.served_by_rank_0(environ.get("MASTER_ADDR") or hosts[0], read.integer("LSB_JOBID"))
        return read.world(self.name, at, *map(read.integer, PLACE), _place_among(hosts, environ), len(hosts))


def _compute_hosts(read: Variables) -> list[str]:
    """The hosts that ranks run on, in the order of the rank file."""
    name = read.text("LSB_DJOB_RANKFILE")
    try:
        launch, *hosts = dict.fromkeys(Path(name).read_text().split())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`LSB_DJOB_RANKFILE={name}` names no file with a host on each line: {error}. LSF writes it for each job."
        ) from error
    return hosts or [launch]


def _place_among(hosts: list[str], environ: Mapping[str, str]) -> int:
    short = [host.partition(".")[0] for host in hosts]
    own = socket.gethostname().partition(".")[0]
    if own not in short:
        raise ValueError(
            f"This machine is {own!r}, but `LSB_DJOB_RANKFILE={environ['LSB_DJOB_RANKFILE']}` has ranks on "
            f"{', '.join(hosts)} only. Start the ranks with `jsrun`."
        )
    return short.index(own)
