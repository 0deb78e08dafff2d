"""`DataParallelStrategy`."""

from __future__ import annotations

from typing import Any

from fabric.lightning.strategies.parallel import ParallelStrategy
from fabric.lightning.unsupported import FABRIC_ARGUMENTS, refuse_arguments
from fabric.strategies.dp import DataParallelStrategy as CoreDataParallel


class DataParallelStrategy(ParallelStrategy):
    """Several devices of one process."""

    def __init__(
        self, accelerator: Any = None, parallel_devices: Any = None, checkpoint_io: Any = None, precision: Any = None
    ) -> None:
        given = {"accelerator": accelerator, "parallel_devices": parallel_devices}
        refuse_arguments(
            "DataParallelStrategy", {**given, "checkpoint_io": checkpoint_io, "precision": precision}, FABRIC_ARGUMENTS
        )
        self._core = CoreDataParallel()
