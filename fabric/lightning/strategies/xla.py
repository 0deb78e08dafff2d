"""`XLAStrategy`."""

from __future__ import annotations

from typing import Any

from fabric.lightning.strategies.strategy import ParallelStrategy, Strategy
from fabric.lightning.unsupported import FABRIC_ARGUMENTS, refuse_arguments, unsupported
from fabric.strategies.xla.fsdp import XLAFSDPStrategy as CoreXLAFSDP
from fabric.strategies.xla.replicas import XLAStrategy as CoreXLA
from fabric.strategies.xla.single_device import SingleDeviceXLAStrategy as CoreSingleXLA


class XLAStrategy(ParallelStrategy):
    """A replica on each XLA device; gradients are averaged."""

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        sync_module_states: bool = True,
    ) -> None:
        given = {"accelerator": accelerator, "parallel_devices": parallel_devices, "checkpoint_io": checkpoint_io}
        refuse_arguments("XLAStrategy", {**given, "precision": precision}, FABRIC_ARGUMENTS)
        if not sync_module_states:
            raise unsupported(
                "XLAStrategy(sync_module_states=False)", "Leave it out: weights are always broadcast from rank 0."
            )
        self._core = CoreXLA()


class SingleDeviceXLAStrategy(Strategy):
    """One process, one XLA device."""

    def __init__(self) -> None:
        self._core = CoreSingleXLA()


class XLAFSDPStrategy(ParallelStrategy):
    """Fully sharded over all XLA devices of a host, by SPMD: the compiler places shards, so there are no options."""

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if value is not None:
                raise unsupported(f"XLAFSDPStrategy({name}={value!r})", "Leave it out: the compiler places the shards.")
        self._core = CoreXLAFSDP()
