"""Reading numbers out of environment variables, with errors that name the variable, its value and its neighbours."""

from __future__ import annotations

from collections.abc import Mapping

from fabric.launchers.world import World


def integer(environ: Mapping[str, str], name: str, default: int | None = None, *, among: str) -> int:
    """The whole number in a variable, or the default where it is not set. `among`: who sets it, for the message."""
    word = environ.get(name)
    if word is None:
        if default is not None:
            return default
        raise ValueError(f"{among} sets `{name}`, but it is not set here. Set it on every rank.")
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"`{name}={word}` is not a whole number. {among} sets it to one on every rank.") from None


def show(environ: Mapping[str, str], *names: str) -> str:
    """The variables that are set, as they would be written in a shell."""
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ)


def checked(world: World, environ: Mapping[str, str], *names: str) -> World:
    """The world, once its numbers are known to fit together."""
    if world.num_nodes * world.local_size < world.size:
        raise ValueError(
            f"{show(environ, *names)}: {world.num_nodes} node(s) with {world.local_size} ranks each hold fewer than "
            f"the {world.size} ranks of the world. Make the variables agree."
        )
    return world
