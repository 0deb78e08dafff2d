"""A description of this machine: devices, cores, how the program was started, and the world of an external launcher.

`Fabric(...)` and `fabric doctor` create it once, and it is frozen, so `resolve` is a function of two values. Tests
create one from numbers. `Machine.look` initialises no device (see `TorchAccelerator`).
"""

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed

from fabric.configure.request import Request
from fabric.launchers.environments import ENVIRONMENTS, detect_world
from fabric.launchers.environments.environment import Environment
from fabric.launchers.environments.torchelastic import OursEnvironment
from fabric.launchers.launcher_registry import OURS
from fabric.launchers.process.program import Program, this_program
from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator, CPUAccelerator
from fabric.strategies.accelerators.accelerator_registry import accelerators, make_accelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy import Strategy
from fabric.strategies.strategy_registry import make_strategy

_SCRIPT = Program(flags=(), kind="script", target="train.py", arguments=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One kind of device, and how many of it this process sees."""

    accelerator: Accelerator
    num_devices: int
    why_unavailable: str | None = None
    """None if it can be used."""
    platform: str = ""
    """See `Accelerator.platform`."""

    @classmethod
    def look(cls, accelerator: Accelerator) -> "Found":
        """Count the devices now."""
        return cls(
            accelerator=accelerator,
            num_devices=accelerator.num_devices(),
            why_unavailable=accelerator.why_unavailable(),
            platform=accelerator.platform(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This node, as this process sees it."""

    found: tuple[Found, ...] = (Found(accelerator=CPUAccelerator(), num_devices=1),)
    """Every accelerator by name, the CPU among them, whether usable or not."""
    system: str = "Linux"
    """Linux, Darwin or Windows."""
    program: Program = _SCRIPT
    world: World | None = None
    """From the environment: an external launcher's, or ours if this process is a rank of an earlier launch."""
    variables: tuple[str, ...] = ()
    """The variables that define the world, as `NAME=value`."""
    has_met_others: bool = False
    """Whether this process is connected to the other ranks of the world: a fabric was launched in it."""
    current_device: int | None = None
    """The index of the device that a rank works on, once it has opened one."""
    own_device: int | None = None
    """In a world of one process inside a rank: the device that `devices=1` means."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The result of the requested strategy's `look_for_packages`."""

    @classmethod
    def look(cls, environ: Mapping[str, str], request: Request) -> "Machine":
        """Describe this machine, and the accelerator, strategy and environment that the request names.

        Raises: ValueError: the accelerator's or the strategy's name is unknown, or the environment's variables
        contradict each other.
        """
        world = _world(environ, request)
        return cls(
            found=tuple(Found.look(accelerator) for accelerator in _to_look_at(request.accelerator)),
            system=platform.system(),
            program=this_program(),
            world=world,
            variables=_variables(environ, world.launcher, request.environment) if world is not None else (),
            has_met_others=world is not None and world.size > 1 and _has_met_others(),
            current_device=_current_device() if world is not None else None,
            packages=_packages(request.strategy),
        )

    def target(self, found: Found, num_devices: int, num_nodes: int, precision: Precision) -> Target:
        """The `Target` with so many of these devices, for `Strategy.refuse`."""
        return Target(
            accelerator=found.accelerator,
            num_devices=num_devices,
            num_nodes=num_nodes,
            precision=precision,
            num_available=found.num_devices,
            platform=found.platform,
            packages=self.packages,
        )

    def of(self, accelerator: str) -> Found:
        """The entry of an accelerator."""
        return next(found for found in self.found if found.accelerator.name == accelerator)

    def usable(self) -> tuple[Found, ...]:
        """The accelerators that can be used here, the CPU last."""
        usable = [found for found in self.found if found.why_unavailable is None and found.num_devices > 0]
        return tuple(sorted(usable, key=lambda found: found.accelerator.name == "cpu"))


def _world(environ: Mapping[str, str], request: Request) -> World | None:
    own = request.environment
    if own is None:
        return detect_world(environ)
    if not own.detect(environ):
        raise ValueError(
            f"`plugins` holds the cluster environment {own.name!r}, but its variables are not set in this process. "
            f"Start the program by {own.name}, or leave the plugin out."
        )
    return own.world(environ)


def _to_look_at(wanted: str | Accelerator) -> tuple[Accelerator, ...]:
    if wanted == "cpu":
        return (CPUAccelerator(),)
    known = {accelerator.name: accelerator for accelerator in accelerators(installed=False)}
    if isinstance(wanted, Accelerator):
        known[wanted.name] = wanted
    elif wanted != "auto" and wanted not in known:
        known[wanted] = make_accelerator(wanted)
    return tuple(known.values())


def _packages(wanted: str | Strategy) -> Mapping[str, str]:
    """The strategies that `auto` chooses need no package beyond the packages of their accelerator."""
    if wanted == "auto":
        return {}
    return (make_strategy(wanted) if isinstance(wanted, str) else wanted).look_for_packages()


def _variables(environ: Mapping[str, str], launcher: str, own: Environment | None) -> tuple[str, ...]:
    teller = own or next((one for one in ENVIRONMENTS if one.name == launcher), OursEnvironment())
    return tuple(f"{name}={environ[name]}" for name in teller.names if name in environ)


def _has_met_others() -> bool:
    """Whether this process has joined a torch process group, or Horovod. Imports neither."""
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return True
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _current_device() -> int | None:
    """Reads the index only if the device is open: opening it here could break a later fork."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    if accelerator is None or accelerator.type == "mps":  # MPS has one device
        return None
    is_open = torch.get_device_module(accelerator).is_initialized()
    return torch.accelerator.current_device_index() if is_open else None


def describe_world(machine: Machine) -> str:
    """The world in the environment: its launcher, its size, and the variables that define it."""
    world = machine.world
    assert world is not None
    if world.launcher in OURS:
        return (
            f"this process is rank {world.rank} of the {world.size} that an earlier `launch()` started by "
            f"{world.launcher!r} ({world.local_size} on this node)"
        )
    read = f"; read: {', '.join(machine.variables)}" if machine.variables else ""
    if world.launcher == "local":
        names = " ".join(each.partition("=")[0] for each in machine.variables)
        read += f"; if no launch by hand is meant, `unset {names}`"
    processes = f"{world.size} process{'es' * (world.size > 1)}"
    return f"{world.launcher} started {processes} ({world.local_size} on this node{read})"
