"""Chooses a launcher at `launch()`: only then is it known what the process has done.

`auto` sends a function to new processes, with its arguments, by `pickle` or `cloudpickle`; changes that the program has
made to modules are not there. It does so even where a fork would have these changes, because whether a fork is safe
depends on the threads that torch has started, and so on the number of cores. Without a function each rank continues at
the line of `launch()`: as a fork if that is safe, and otherwise by running the script up to that line.
"""

from collections.abc import Callable
from typing import Any

from fabric.launchers.fork import Fork, why_fork_is_unsafe
from fabric.launchers.launcher import External, Launcher, Topology, inline
from fabric.launchers.launcher_registry import launcher_row
from fabric.launchers.process.program import caller_that_continues, imported_script, this_program
from fabric.launchers.start_methods import Processes, Script, forkserver
from fabric.launchers.world import World


def choose_launcher(
    word: str,
    topology: Topology,
    *,
    function: Callable[..., Any] | None,
    world: World | None,
    max_restarts: int = 0,
    device_type: str | None = None,
) -> Launcher:
    """The launcher of a name; for `auto` one that works in this process.

    `world`: the place of this process, if an external launcher or an earlier launch has made it a rank. `max_restarts`:
    how often `elastic` starts all ranks again. `device_type`: the type of device that ranks use; None: any type.
    Raises: ValueError: no launcher has this name, or it does not work here.
    """
    file = imported_script()
    if file is not None:
        raise RuntimeError(
            f"{file} launches while another process imports it: a rank, or a worker of a `DataLoader`, which needs the "
            "functions in it, and reached `launch` instead. Put what runs the script under `if __name__ == "
            "'__main__':`."
        )
    if world is not None:
        return External(world)
    row = None if word == "auto" else launcher_row(word)
    if topology.size == 1 and not topology.redirects_output and word != "elastic":
        return inline(topology)
    if function is None and not (row and row.needs_function) and (caller := caller_that_continues()):
        raise ValueError(
            f"`launch()` in {caller}: every rank would run all that comes after it in {caller}, and this process would "
            "end. Pass what they do as a function: `launch(function)`."
        )
    if word == "elastic" and function is None:
        return Script(topology, word, max_restarts)
    if word == "elastic":
        return Processes(topology, "elastic", forkserver(topology).start, max_restarts)
    if row is not None and word != "fork":
        return row.make(topology)
    if function is not None and word == "auto":
        return forkserver(topology, is_chosen=True)
    program = this_program()
    # Ranks on the CPU use a device when they pin memory: where another launcher works, a fork may not lose any device.
    unsafe = why_fork_is_unsafe(None if word == "auto" and program.can_run_again else device_type)
    if unsafe is None:
        return Fork(topology)
    if word == "fork":
        raise ValueError(f"`launcher='fork'`: {unsafe}. Call `launch` before that, or pass `launcher='auto'`.")
    if program.can_run_again:
        return Script(topology)
    raise ValueError(
        f"`launch()` in {program.words} cannot fork: {unsafe}. And it cannot run the program again: there is no file. "
        "Call `launch()` before the first tensor operation, or pass what the ranks run: `launch(function)`."
    )
