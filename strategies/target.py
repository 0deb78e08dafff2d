"""What a strategy is asked to run on, and what was found there: all that `Strategy.refuse` may look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import final

from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision

_PRECISION = Precision.parse("32-true")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Devices, precision and packages, looked at before. A test writes one from numbers."""

    accelerator: Accelerator
    num_devices: int = 1
    """Devices that the strategy is to use on each node."""
    num_nodes: int = 1
    precision: Precision = _PRECISION
    num_available: int = 1
    """Devices of the accelerator that this process sees."""
    platform: str = ""
    """See `Accelerator.platform`."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """What `Strategy.look_for_packages` found."""

    @property
    def size(self) -> int:
        """Devices on all nodes."""
        return self.num_devices * self.num_nodes


def releases(*packages: str) -> dict[str, str]:
    """The installed releases of these packages, without those that are not installed. Imports none of them."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
