"""`SingleDeviceStrategy`."""

from __future__ import annotations

from typing import Any

from fabric.lightning.strategies.strategy import Strategy
from fabric.lightning.unsupported import FABRIC_ARGUMENTS, refuse_arguments
from fabric.strategies.single_device import SingleDeviceStrategy as CoreSingleDevice


class SingleDeviceStrategy(Strategy):
    """One process, one device. Pass the device to `Fabric(accelerator=..., devices=...)`."""

    def __init__(
        self, device: Any = None, accelerator: Any = None, checkpoint_io: Any = None, precision: Any = None
    ) -> None:
        given = {"device": device, "accelerator": accelerator, "checkpoint_io": checkpoint_io, "precision": precision}
        device_instead = {"device": "Pass it to `Fabric`: `Fabric(accelerator='cuda', devices=[1])` for `cuda:1`."}
        refuse_arguments("SingleDeviceStrategy", given, {**FABRIC_ARGUMENTS, **device_instead})
        self._core = CoreSingleDevice()
