"""Which devices of a node are used: the requested ones, or for `auto` all that the strategy can use.

If a world exists already, `auto` takes as many as it has processes on this node. On the CPU, which all processes share,
"devices" are processes, counted from 0.
"""

from fabric.configure.machine import Found, Machine, describe_world
from fabric.configure.request import Request
from fabric.launchers.launcher_registry import OURS
from fabric.strategies.strategy import Strategy


def choose_devices(request: Request, machine: Machine, found: Found, strategy: Strategy) -> tuple[int, ...]:
    """The indices of this node's devices.

    Raises: ValueError: there are fewer devices, or none for some rank of the world.
    """
    if request.devices == "auto":
        return _auto_devices(request, machine, found, strategy)
    return requested_devices(request, machine, found)


def _auto_devices(request: Request, machine: Machine, found: Found, strategy: Strategy) -> tuple[int, ...]:
    """All devices that the strategy can use; in an existing world, as many as it has processes on this node."""
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


def requested_devices(request: Request, machine: Machine, found: Found) -> tuple[int, ...]:
    """The requested devices: a number of them, indices, or all."""
    wanted, name, count = request.devices, found.accelerator.name, found.num_devices
    assert wanted != "auto"
    if found.accelerator.is_shared:
        if not isinstance(wanted, int):
            shown = "-1" if wanted == "all" else repr(list(wanted))
            raise ValueError(
                f"`devices={shown}` selects devices, but `accelerator={name!r}` is one device that any number of "
                f"processes share. Write a number of processes, such as `devices=2`."
            )
        return tuple(range(wanted))
    if isinstance(wanted, int) and wanted > 1 and _one_each(machine, found):
        return (0,) * wanted  # where it is not the world's number, _check_world says so
    if wanted == 1 and machine.own_device is not None:
        return (machine.own_device if machine.own_device < count else 0,)
    indices = tuple(range(count)) if wanted == "all" else tuple(range(wanted)) if isinstance(wanted, int) else wanted
    if beyond := [index for index in indices if index >= count]:
        shown = f"{wanted} devices" if isinstance(wanted, int) else f"device {', '.join(map(str, beyond))}"
        count_or_indices = wanted if isinstance(wanted, int) else list(wanted)
        raise ValueError(
            f"`devices={count_or_indices}` asks for {shown} of `accelerator={name!r}`, but this process sees "
            f"{_counted(found)}. "
            f"Write fewer, or `devices='auto'`."
        )
    return indices


def _one_each(machine: Machine, found: Found) -> bool:
    """Whether an external launcher shows every process one device of its own, as `srun --gpus-per-task=1` does.

    torchrun and our launchers show all devices to all processes: with them, one device for several processes is an
    error.
    """
    world = machine.world
    shows_all = (*OURS, "torchelastic")
    return world is not None and world.local_size > found.num_devices == 1 and world.launcher not in shows_all


def _counted(found: Found) -> str:
    return f"{found.num_devices} {found.accelerator.name} device{'s' * (found.num_devices != 1)}"
