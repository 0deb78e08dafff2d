"""`DataParallelStrategy`."""

from __future__ import annotations

from typing import Any

from fabric.lightning.carry import ELSEWHERE, refuse_said
from fabric.lightning.strategies.parallel import ParallelStrategy
from fabric.strategies.dp import DataParallelStrategy as CoreDataParallel


class DataParallelStrategy(ParallelStrategy):
    """Several devices of one process."""

    def __init__(
        self, accelerator: Any = None, parallel_devices: Any = None, checkpoint_io: Any = None, precision: Any = None
    ) -> None:
        said = {"accelerator": accelerator, "parallel_devices": parallel_devices}
        refuse_said("DataParallelStrategy", {**said, "checkpoint_io": checkpoint_io, "precision": precision}, ELSEWHERE)
        self._core = CoreDataParallel()
