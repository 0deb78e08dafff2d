"""Strategies with Lightning Fabric's names and arguments; `strategy.core(num_nodes)` is the core's."""

from datetime import timedelta
from typing import Any

from fabric import strategies as core_strategies
from fabric.lightning.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
from fabric.lightning.strategies.fsdp import FSDPStrategy as FSDPStrategy
from fabric.lightning.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
from fabric.lightning.strategies.strategy import ParallelStrategy as ParallelStrategy
from fabric.lightning.strategies.strategy import Strategy as Strategy
from fabric.lightning.strategies.strategy import process_options, refuse_unknown
from fabric.lightning.unsupported import FABRIC_ARGUMENTS, refuse_arguments, unsupported


class SingleDeviceStrategy(Strategy):
    """One process, one device. Pass the device to `Fabric(accelerator=..., devices=...)`."""

    def __init__(
        self, device: Any = None, accelerator: Any = None, checkpoint_io: Any = None, precision: Any = None
    ) -> None:
        device_instead = {"device": "Pass it to `Fabric`: `Fabric(accelerator='cuda', devices=[1])` for `cuda:1`."}
        refuse_arguments("SingleDeviceStrategy", locals(), {**FABRIC_ARGUMENTS, **device_instead})
        self._core = core_strategies.SingleDeviceStrategy()


class DataParallelStrategy(ParallelStrategy):
    """Several devices of one process."""

    def __init__(
        self, accelerator: Any = None, parallel_devices: Any = None, checkpoint_io: Any = None, precision: Any = None
    ) -> None:
        refuse_arguments("DataParallelStrategy", locals(), FABRIC_ARGUMENTS)
        self._core = core_strategies.DataParallelStrategy()


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
        options = process_options("DDPStrategy", locals())
        refuse_unknown("DDPStrategy", kwargs, _DDP_OPTIONS)
        if (megabytes := kwargs.pop("bucket_cap_mb", None)) is not None:
            options["bucket_bytes"] = int(megabytes * 2**20)
        self._core = core_strategies.DDPStrategy(**options, **kwargs)


_DDP_OPTIONS = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)


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
        refuse_arguments("XLAStrategy", locals(), FABRIC_ARGUMENTS)
        if not sync_module_states:
            raise unsupported(
                "XLAStrategy(sync_module_states=False)", "Leave it out: weights are always broadcast from rank 0."
            )
        self._core = core_strategies.XLAStrategy()


class SingleDeviceXLAStrategy(Strategy):
    """One process, one XLA device."""

    def __init__(self) -> None:
        self._core = core_strategies.SingleDeviceXLAStrategy()


class XLAFSDPStrategy(ParallelStrategy):
    """Fully sharded over all XLA devices of a host, by SPMD: the compiler places shards, so there are no options."""

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if value is not None:
                raise unsupported(f"XLAFSDPStrategy({name}={value!r})", "Leave it out: the compiler places the shards.")
        self._core = core_strategies.XLAFSDPStrategy()


_BY_CORE: dict[str, type[Strategy]] = {
    kind.__name__: kind
    for kind in (
        DDPStrategy,
        DataParallelStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
        SingleDeviceXLAStrategy,
        XLAFSDPStrategy,
        XLAStrategy,
    )
}
"""Classes by the name of the core's class, which is the same."""


def strategy_of(strategy: core_strategies.Strategy) -> Strategy:
    """The core's strategy as an instance of Lightning Fabric's class name; `Strategy` if it has none."""
    return _BY_CORE.get(type(strategy).__name__, Strategy).holding(strategy)
