"""Reads a world from environment variables, with errors that name the variables and their values."""

from __future__ import annotations

from collections.abc import Mapping

from fabric.launchers.world import Rendezvous, World

FIRST_PORT, NUM_PORTS = 15_000, 10_000
"""Below the ports that systems hand out by themselves (32768 and up on Linux)."""


def text(environ: Mapping[str, str], name: str, *, among: str) -> str:
    """The value of a variable. `among`: who sets it, for the message."""
    if not environ.get(name):
        raise ValueError(f"{among} sets `{name}`, but it is not set here. Set it on every rank.")
    return environ[name]


def integer(environ: Mapping[str, str], name: str, default: int | None = None, *, among: str) -> int:
    """The integer in a variable, or the default if it is not set."""
    if default is not None and name not in environ:
        return default
    word = text(environ, name, among=among)
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"`{name}={word}` is not a whole number. {among} sets it to one on every rank.") from None


def show(environ: Mapping[str, str], *names: str) -> str:
    """The variables that are set, as they would be written in a shell."""
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ)


def port_of_job(environ: Mapping[str, str], job: int, step: int = 0, *, among: str) -> int:
    """MASTER_PORT, or a port derived from the job's number, so that two jobs on a node do not conflict."""
    return integer(environ, "MASTER_PORT", FIRST_PORT + (job * 7 + step) % NUM_PORTS, among=among)


def world_from(
    environ: Mapping[str, str],
    *names: str,
    launcher: str,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    node_rank: int,
    num_nodes: int,
    rendezvous: Rendezvous | None,
    start: str,
) -> World:
    """The world of these numbers, read from the variables `names`. A world of one drops its rendezvous.

    Raises: ValueError: they contradict each other. `start`: how its ranks are started, for the message.
    """
    try:
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            rendezvous=rendezvous if size > 1 else None,
            launcher=launcher,
        )
    except ValueError as error:
        raise ValueError(
            f"{show(environ, *names)}: these contradict each other. {error} Start the ranks with {start}, and leave "
            "its variables as they are."
        ) from error


def checked(world: World, environ: Mapping[str, str], *names: str) -> World:
    """The world, after its numbers were checked."""
    if world.num_nodes * world.local_size < world.size:
        raise ValueError(
            f"{show(environ, *names)}: {world.num_nodes} node(s) with {world.local_size} ranks each hold fewer than "
            f"the {world.size} ranks of the world. Make the variables agree."
        )
    return world
