"""`DDPStrategy`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fabric.lightning.strategies.strategy import ParallelStrategy, processes, unknown
from fabric.lightning.unsupported import FABRIC_ARGUMENTS, refuse_arguments
from fabric.strategies.ddp.strategy import DDPStrategy as CoreDDP
from fabric.strategies.dp import DataParallelStrategy as CoreDataParallel


class DDPStrategy(ParallelStrategy):
    """A replica of the model in every process; gradients are averaged.

    `start_method="popen"`: fork if that is safe, otherwise start the script again. Options of torch's
    DistributedDataParallel: `bucket_cap_mb`, `find_unused_parameters`, `static_graph`, `gradient_as_bucket_view`,
    `broadcast_buffers`.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **kwargs: Any,
    ) -> None:
        options = processes(
            "DDPStrategy",
            process_group_backend,
            timeout,
            start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        unknown("DDPStrategy", kwargs, dict.fromkeys(_OPTIONS))
        if (megabytes := kwargs.pop("bucket_cap_mb", None)) is not None:
            options["bucket_bytes"] = int(megabytes * 2**20)
        self._core = CoreDDP(**options, **kwargs)


_OPTIONS = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


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
