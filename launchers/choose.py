"""Chooses a launcher at `launch()`: only then is it known what the process has done.

`auto` forks if that is safe, with and without a function: ranks then have everything that the program has created,
defined or patched. Otherwise the program runs again in each rank; a function is sent to new processes, with its
arguments, by `pickle` or `cloudpickle`, and changes that the program has made to other modules are not there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from fabric.launchers.external import External, inline
from fabric.launchers.fork import NO_NEXT_LINE, Fork
from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.process.program import this_program
from fabric.launchers.processes import Processes, forkserver
from fabric.launchers.rank.fork_safety import fork_is_safe
from fabric.launchers.registry import launcher_row
from fabric.launchers.script import Script
from fabric.launchers.world import World


def choose_launcher(
    word: str,
    topology: Topology,
    *,
    function: Callable[..., Any] | None,
    world: World | None,
    max_restarts: int = 0,
) -> Launcher:
    """The launcher of a name; for `auto` the fastest one that works in this process.

    `world`: the place of this process, if an external launcher or an earlier launch has made it a rank. `max_restarts`:
    how often `elastic` starts all ranks again.
    Raises: ValueError: no launcher has this name, or it does not work here.
    """
    _refuse_import()
    if world is not None:
        return External(world)
    row = None if word == "auto" else launcher_row(word)
    if word == "elastic":
        return _elastic(topology, function, max_restarts)
    if topology.size == 1 and not topology.redirects_output:
        return inline(topology)
    if row is not None and word != "fork":
        return row.make(topology)
    unsafe = fork_is_safe()
    if unsafe is None:
        return Fork(topology)
    return _without_fork(word, topology, function, unsafe)


def _refuse_import() -> None:
    """Raise RuntimeError where the program is only being imported, by ours or by `multiprocessing` as `__mp_main__`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            raise RuntimeError(
                f"{frame.f_code.co_filename} launches while another process imports it: a rank, or a worker of a "
                "`DataLoader`, which needs the functions in it, and reached `launch` instead. Put what runs the script "
                "under `if __name__ == '__main__':`."
            )
        frame = frame.f_back


def _elastic(topology: Topology, function: Callable[..., Any] | None, max_restarts: int) -> Launcher:
    """Starts all ranks again after a failure: the others have lost a peer in the middle of a collective.

    Each attempt is a launch of its own, of which nothing is left but the script's last checkpoint.
    """
    if function is None:
        return Script(topology, "elastic", max_restarts)
    return Processes(topology, "elastic", forkserver(topology).start, max_restarts)


def _without_fork(word: str, topology: Topology, function: Callable[..., Any] | None, unsafe: str) -> Launcher:
    program = this_program()
    if function is None and program.is_interactive:
        raise ValueError(NO_NEXT_LINE)
    if word == "fork":
        raise ValueError(f"`launcher='fork'`: {unsafe}. Call `launch` before that, or pass `launcher='auto'`.")
    if function is not None:
        return forkserver(topology)
    if program.can_run_again:
        return Script(topology)
    raise ValueError(
        f"`launch()` in {program.words} cannot fork: {unsafe}. And it cannot run the program again: there is no file. "
        "Call `launch()` before the first tensor operation, or pass a function that a module file defines: "
        "`launch(function)` with `launcher='forkserver'`."
    )
