"""`XLAStrategy`."""

from __future__ import annotations

from typing import Any

from fabric.lightning.strategies.parallel import ParallelStrategy
from fabric.lightning.unsupported import FABRIC_ARGUMENTS, refuse_arguments, unsupported
from fabric.strategies.xla.replicas import XLAStrategy as CoreXLA


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
