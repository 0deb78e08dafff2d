"""`SingleDeviceXLAStrategy`."""

from __future__ import annotations

from fabric.lightning.strategies.strategy import Strategy
from fabric.strategies.xla.single_device import SingleDeviceXLAStrategy as CoreSingleXLA


class SingleDeviceXLAStrategy(Strategy):
    """One process, one XLA device."""

    def __init__(self) -> None:
        self._core = CoreSingleXLA()
