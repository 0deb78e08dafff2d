"""From the user's word to a launcher, at the moment of `launch()`: only then is it known what the process has done.

`auto` forks where that is safe, with and without a function: ranks then have all that the program has made, defined or
patched. Otherwise the program runs again in each rank; a function is sent to fresh processes, with its arguments, by
`pickle` or `cloudpickle`, and what the program has changed in modules beside them is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fabric.launchers.elastic import Elastic
from fabric.launchers.external import External
from fabric.launchers.fork import Fork
from fabric.launchers.inline import Inline
from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.processes import forkserver, spawn
from fabric.launchers.rank.fork_safety import fork_is_safe
from fabric.launchers.rank.program import this_program
from fabric.launchers.script import Script
from fabric.launchers.world import World
from fabric.launchers.xla import XLA

WORDS = ("auto", "inline", "script", "fork", "forkserver", "spawn", "elastic", "xla", "external")


def choose_launcher(
    word: str,
    topology: Topology,
    *,
    function: Callable[..., Any] | None,
    world: World | None,
    max_restarts: int = 0,
) -> Launcher:
    """The launcher that `word` names; for `auto` the fastest one that works here and now.

    `world`: what an external launcher, or an earlier launch of ours, has made of this process. `max_restarts`: how
    often `elastic` starts all ranks again.
    Raises: ValueError: the word does not work here; the message says which one does.
    """
    if word not in WORDS:
        raise ValueError(f"`launcher={word!r}` names no launcher. Write one of {', '.join(map(repr, WORDS))}.")
    if world is not None:
        return _existing(word, topology, world)
    if word == "external":
        raise ValueError(
            "`launcher='external'` takes its ranks from torchrun, srun or the variables RANK and WORLD_SIZE, and none "
            "of them is set. Start the script with `torchrun`, or pass `launcher='auto'`."
        )
    if word == "elastic":
        return Elastic(topology, max_restarts)
    if topology.size == 1:
        return Inline()
    if word == "inline":
        raise ValueError(
            f"`launcher='inline'` is this process alone, but {topology.size} ranks were asked for. "
            "Pass `devices=1`, or `launcher='auto'`."
        )
    if word == "auto":
        return _automatic(topology, function)
    return _named(word, topology, function)


def _existing(word: str, topology: Topology, world: World) -> Launcher:
    if word not in ("auto", "external", world.launcher):
        raise ValueError(
            f"`launcher={word!r}`, but this process is rank {world.rank} of {world.size} already, made by "
            f"{world.launcher}. Pass `launcher='auto'` to be that rank."
        )
    is_as_found = (topology.num_processes, topology.num_nodes) == (world.local_size, world.num_nodes)
    if topology.size not in (1, world.size) and not is_as_found:  # nodes may have different numbers of ranks
        raise ValueError(
            f"{topology.size} ranks were asked for, but this process is rank {world.rank} of {world.size} already, "
            f"made by {world.launcher}. Ask for {world.size}."
        )
    return External(world)


def _automatic(topology: Topology, function: Callable[..., Any] | None) -> Launcher:
    program, unsafe = this_program(), fork_is_safe()
    if function is not None:
        return Fork(topology) if unsafe is None else forkserver(topology)
    if program.kind == "interactive":
        raise ValueError(NO_NEXT_LINE)
    if unsafe is None:
        return Fork(topology)
    if program.can_run_again:
        return Script(topology)
    raise ValueError(
        f"`launch()` in {program.words} cannot fork: {unsafe}. And it cannot run the program again: there is no file. "
        "Call `launch()` before the first tensor operation, or pass a function that a module file defines: "
        "`launch(function)` with `launcher='forkserver'`."
    )


def _named(word: str, topology: Topology, function: Callable[..., Any] | None) -> Launcher:
    if word == "fork":
        unsafe = fork_is_safe()
        if unsafe is not None:
            raise ValueError(
                f"`launcher='fork'`: {unsafe}. Call `launch` before the first tensor operation, or pass "
                "`launcher='forkserver'` and a function."
            )
        if function is None and this_program().kind == "interactive":
            raise ValueError(NO_NEXT_LINE)
        return Fork(topology)
    if word == "script":
        return Script(topology)
    if word == "xla":
        return XLA(topology)
    launcher = (spawn if word == "spawn" else forkserver)(topology)
    if function is None:
        launcher.enter()  # says what to write instead
    return launcher


NO_NEXT_LINE = (
    "`launch()` in an interactive session: the lines to come are typed into one process, and several ranks cannot "
    "share them. Pass what they do as a function: `launch(function)`, with `launcher='fork'` where it was typed here."
)
