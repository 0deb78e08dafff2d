"""The configuration that a strategy is asked to run on: all that `Strategy.refuse` may read."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import final

from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision

_PRECISION = Precision.parse("32-true")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Devices, precision and packages, determined before. Tests create one from numbers."""

    accelerator: Accelerator
    num_devices: int = 1
    """Devices per node that the strategy is to use."""
    num_nodes: int = 1
    precision: Precision = _PRECISION
    num_available: int = 1
    """Devices of the accelerator that this process sees."""
    platform: str = ""
    """See `Accelerator.platform`."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The result of `Strategy.look_for_packages`."""

    @property
    def size(self) -> int:
        """The number of devices on all nodes."""
        return self.num_devices * self.num_nodes


def releases(*packages: str) -> dict[str, str]:
    """The versions of these packages that are installed; others are left out. Imports none of them."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
