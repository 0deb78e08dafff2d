"""Which devices of a node are used: those that were asked for, or for `auto` those that the strategy takes.

Where a world exists already, `auto` takes as many as make its processes. On the CPU, which all processes share, the
"devices" are processes, and count from 0 like any other.
"""

from __future__ import annotations

from fabric.conflicts import describe_world
from fabric.launchers.registry import OURS
from fabric.machine import Found, Machine
from fabric.request import Request
from fabric.strategies.strategy import Strategy


def choose_devices(request: Request, machine: Machine, found: Found, strategy: Strategy) -> tuple[int, ...]:
    """The indices of this node's devices.

    Raises: ValueError: there are not so many, or none for some rank of the world.
    """
    if request.devices == "auto":
        return _auto_devices(request, machine, found, strategy)
    return said_devices(request, machine, found)


def _auto_devices(request: Request, machine: Machine, found: Found, strategy: Strategy) -> tuple[int, ...]:
    """All devices that the strategy takes, as many as make the world's processes where there is a world."""
    world = machine.world
    few = world.local_size if world is not None else 1
    if found.accelerator.is_shared:
        return tuple(range(few))
    if _one_each(machine, found):
        return (0,) * few
    nodes = world.num_nodes if world is not None else request.num_nodes
    every = found.num_devices
    fits = world is None or strategy.num_processes(every) == few
    if fits and strategy.refuse(machine.target(found, every, nodes, request.precision)) is None:
        return tuple(range(every))
    if few > every:
        raise ValueError(
            f"This process sees {_counted(found)}, but {describe_world(machine)}: a rank would have none of its own. "
            f"Start at most {every} per node, or write `accelerator='cpu'`."
        )
    return tuple(range(few))


def said_devices(request: Request, machine: Machine, found: Found) -> tuple[int, ...]:
    """The devices that were asked for: a number of them, indices, or all."""
    said, name, count = request.devices, found.accelerator.name, found.num_devices
    assert said != "auto"
    if found.accelerator.is_shared:
        if not isinstance(said, int):
            shown = "-1" if said == "all" else repr(list(said))
            raise ValueError(
                f"`devices={shown}` chooses among devices, but `accelerator={name!r}` is one device that any number of "
                f"processes share. Write how many processes there are to be, such as `devices=2`."
            )
        return tuple(range(said))
    if isinstance(said, int) and said > 1 and _one_each(machine, found):
        return (0,) * said  # where it is not the world's number, _check_world says so
    if said == 1 and machine.own_device is not None:
        return (machine.own_device if machine.own_device < count else 0,)
    indices = tuple(range(count)) if said == "all" else tuple(range(said)) if isinstance(said, int) else said
    if beyond := [index for index in indices if index >= count]:
        shown = f"{said} devices" if isinstance(said, int) else f"device {', '.join(map(str, beyond))}"
        written = said if isinstance(said, int) else list(said)
        raise ValueError(
            f"`devices={written}` asks for {shown} of `accelerator={name!r}`, but this process sees {_counted(found)}. "
            f"Write fewer, or `devices='auto'`."
        )
    return indices


def _one_each(machine: Machine, found: Found) -> bool:
    """Whether a foreign launcher showed every process one device of its own, as `srun --gpus-per-task=1` does.

    torchrun and our launchers show all devices to all processes, so one device for several is a mistake there.
    """
    world = machine.world
    shows_all = (*OURS, "torchelastic")
    return world is not None and world.local_size > found.num_devices == 1 and world.launcher not in shows_all


def _counted(found: Found) -> str:
    return f"{found.num_devices} {found.accelerator.name} device{'s' * (found.num_devices != 1)}"
