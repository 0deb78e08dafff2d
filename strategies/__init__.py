"""Strategies: how a model is distributed over devices, and the parts they are composed of.

The names below are imported at their first use, so that an unused strategy does not import its backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fabric.strategies.strategy_registry import TABLE

if TYPE_CHECKING:
    from fabric.strategies.collectives.row_exchange import Route as Route
    from fabric.strategies.ddp.comm_hooks import PowerSGD as PowerSGD
    from fabric.strategies.ddp.strategy import DDPStrategy as DDPStrategy
    from fabric.strategies.deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from fabric.strategies.dp import DataParallelStrategy as DataParallelStrategy
    from fabric.strategies.fairscale.fsdp import FairScaleFSDPStrategy as FairScaleFSDPStrategy
    from fabric.strategies.fairscale.sharded_ddp import FairScaleShardedStrategy as FairScaleShardedStrategy
    from fabric.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy
    from fabric.strategies.horovod.strategy import HorovodStrategy as HorovodStrategy
    from fabric.strategies.manual.strategy import ManualContext as ManualContext
    from fabric.strategies.manual.strategy import ManualStrategy as ManualStrategy
    from fabric.strategies.manual.strategy import Parallelized as Parallelized
    from fabric.strategies.model_parallel.pipeline.options import Pipeline as Pipeline
    from fabric.strategies.model_parallel.strategy import ModelParallelStrategy as ModelParallelStrategy
    from fabric.strategies.module.wrap_policy import blocks_of as blocks_of
    from fabric.strategies.precision.precision import Precision as Precision
    from fabric.strategies.sharding.mesh import along as along
    from fabric.strategies.single_device import SingleDeviceStrategy as SingleDeviceStrategy
    from fabric.strategies.strategy import Strategy as Strategy
    from fabric.strategies.strategy_registry import available_strategies as available_strategies
    from fabric.strategies.strategy_registry import register_strategy as register_strategy
    from fabric.strategies.xla.fsdp import XLAFSDPStrategy as XLAFSDPStrategy
    from fabric.strategies.xla.replicas import XLAStrategy as XLAStrategy
    from fabric.strategies.xla.single_device import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy

_HOME = {
    **{name: module for module, _, name in (path.partition(":") for path, _, _ in TABLE.values())},
    "ManualContext": "manual.strategy",
    "Parallelized": "manual.strategy",
    "Pipeline": "model_parallel.pipeline.options",
    "PowerSGD": "ddp.comm_hooks",
    "Precision": "precision.precision",
    "Route": "collectives.row_exchange",
    "Strategy": "strategy",
    "along": "sharding.mesh",
    "available_strategies": "strategy_registry",
    "blocks_of": "module.wrap_policy",
    "register_strategy": "strategy_registry",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fabric.strategies' has no attribute {name!r}")
    return getattr(import_module(f"fabric.strategies.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
