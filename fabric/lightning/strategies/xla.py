"""`XLAStrategy`."""

from __future__ import annotations

from typing import Any

from fabric.lightning.carry import ELSEWHERE, refuse, refuse_said
from fabric.lightning.strategies.parallel import ParallelStrategy
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
        said = {"accelerator": accelerator, "parallel_devices": parallel_devices, "checkpoint_io": checkpoint_io}
        refuse_said("XLAStrategy", {**said, "precision": precision}, ELSEWHERE)
        if not sync_module_states:
            raise refuse("XLAStrategy(sync_module_states=False)", "The weights of rank 0 are what is trained.")
        self._core = CoreXLA()
