"""Accelerators by name: those of torch, those a program registered, and those of installed packages.

Note [What is registered]: `_REGISTERED` is module state, the only one here. A registered name must be found by every
`Fabric` that the process creates later; Python's registry of codecs works in the same way. Names are only added, and
never change their meaning. Entry points are read when a name is unknown, or when all are listed: scanning all installed
distributions takes tens of milliseconds, which a program with `accelerator="cuda"` does not pay.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.accelerators.cpu import CPUAccelerator
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator
from fabric.strategies.accelerators.xla import XLAAccelerator

ENTRY_POINTS = "fabric.accelerators"
"""The entry-point group in which a package names a callable without arguments that returns an `Accelerator`."""

_BUILT_IN: tuple[Accelerator, ...] = (
    CPUAccelerator(),
    *(TorchAccelerator(name) for name in ("cuda", "mps", "xpu", "hpu", "npu")),
    XLAAccelerator(),
)
_REGISTERED: dict[str, Callable[[], Accelerator]] = {}


def accelerators(*, installed: bool = True) -> tuple[Accelerator, ...]:
    """Every accelerator by name, whether or not this machine has it; see `why_unavailable()`.

    `installed=False` leaves out the entry points of installed packages, and their cost.
    """
    factories = {**_REGISTERED, **(_installed() if installed else {})}
    return (*_BUILT_IN, *(factory() for factory in factories.values()))


def available_accelerators() -> tuple[str, ...]:
    """The names that `Fabric(accelerator=...)` can use on this machine now."""
    return tuple(accelerator.name for accelerator in accelerators() if accelerator.why_unavailable() is None)


def make_accelerator(name: str) -> Accelerator:
    """The accelerator of a name.

    Raises: ValueError: the name is unknown; the message has similar names and all names.
    """
    for accelerator in _BUILT_IN:
        if accelerator.name == name:
            return accelerator
    factory = _REGISTERED.get(name) or _installed().get(name)
    if factory is None and name == "tpu":
        raise ValueError(
            "`accelerator='tpu'` is `accelerator='xla'` here: TPUs are used through torch_xla. Write 'xla'."
        )
    if factory is None and name == "gpu":
        on_mps = TorchAccelerator("mps").num_devices() > 0
        meant = "'mps' for the GPU of this machine" if on_mps else "'cuda' for the GPUs of NVIDIA and AMD"
        raise ValueError(
            f"`accelerator='gpu'` names several kinds of device. Write {meant}, or 'auto' for what this machine has."
        )
    if factory is None:
        known = [*(accelerator.name for accelerator in _BUILT_IN), *_REGISTERED, *_installed()]
        near = "".join(f"Did you mean {match!r}? " for match in get_close_matches(name, known, n=1))
        raise ValueError(
            f"`accelerator={name!r}` is not known. {near}Write 'auto' or one of {', '.join(map(repr, known))}; "
            f"`register_accelerator` adds one."
        )
    return factory()


def register_accelerator(name: str, factory: Callable[[], Accelerator]) -> None:
    """Make `Fabric(accelerator=name)` use the result of `factory()`, in this process from now on.

    Raises: ValueError: the name is taken.
    """
    taken = [*(accelerator.name for accelerator in _BUILT_IN), *_REGISTERED, "auto"]
    if name in taken:
        raise ValueError(
            f"`register_accelerator({name!r}, ...)`: the name is taken, as are {', '.join(map(repr, sorted(taken)))}. "
            f"Choose another."
        )
    _REGISTERED[name] = factory


def _installed() -> dict[str, Callable[[], Accelerator]]:
    """The factories of installed packages, not yet imported."""
    return {entry.name: partial(_load_and_call, entry) for entry in entry_points(group=ENTRY_POINTS)}


def _load_and_call(entry: EntryPoint) -> Any:
    return entry.load()()
