"""`SingleDeviceStrategy`."""

from __future__ import annotations

from typing import Any

from fabric.lightning.carry import ELSEWHERE, refuse_said
from fabric.lightning.strategies.strategy import Strategy
from fabric.strategies.single_device import SingleDeviceStrategy as CoreSingleDevice


class SingleDeviceStrategy(Strategy):
    """One process, one device. The device is said to `Fabric(accelerator=..., devices=...)`."""

    def __init__(
        self, device: Any = None, accelerator: Any = None, checkpoint_io: Any = None, precision: Any = None
    ) -> None:
        said = {"device": device, "accelerator": accelerator, "checkpoint_io": checkpoint_io, "precision": precision}
        device_instead = {"device": "Pass it to `Fabric`: `Fabric(accelerator='cuda', devices=[1])` for `cuda:1`."}
        refuse_said("SingleDeviceStrategy", said, {**ELSEWHERE, **device_instead})
        self._core = CoreSingleDevice()
