"""How a model lies over devices: the strategies, and the parts they are composed of.

The names below are imported when they are first used: a strategy's backend costs nothing to who does not use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric.strategies.collectives.route import Route as Route
    from fabric.strategies.ddp import DDPStrategy as DDPStrategy
    from fabric.strategies.ddp_hooks import PowerSGD as PowerSGD
    from fabric.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from fabric.strategies.dp import DataParallelStrategy as DataParallelStrategy
    from fabric.strategies.fairscale_ddp import FairScaleShardedStrategy as FairScaleShardedStrategy
    from fabric.strategies.fairscale_fsdp import FairScaleFSDPStrategy as FairScaleFSDPStrategy
    from fabric.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from fabric.strategies.horovod import HorovodStrategy as HorovodStrategy
    from fabric.strategies.manual import ManualContext as ManualContext
    from fabric.strategies.manual import ManualStrategy as ManualStrategy
    from fabric.strategies.manual import Parallelized as Parallelized
    from fabric.strategies.mesh import along as along
    from fabric.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
    from fabric.strategies.pipeline import Pipeline as Pipeline
    from fabric.strategies.precision.precision import Precision as Precision
    from fabric.strategies.registry import available_strategies as available_strategies
    from fabric.strategies.registry import register_strategy as register_strategy
    from fabric.strategies.single import SingleDeviceStrategy as SingleDeviceStrategy
    from fabric.strategies.strategy import Strategy as Strategy
    from fabric.strategies.xla import XLAStrategy as XLAStrategy
    from fabric.strategies.xla_fsdp import XLAFSDPStrategy as XLAFSDPStrategy
    from fabric.strategies.xla_model_parallel import XLAModelParallelStrategy as XLAModelParallelStrategy
    from fabric.strategies.xla_single import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy

_HOME = {
    "DDPStrategy": "ddp",
    "DataParallelStrategy": "dp",
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "FairScaleFSDPStrategy": "fairscale_fsdp",
    "FairScaleShardedStrategy": "fairscale_ddp",
    "HorovodStrategy": "horovod",
    "ManualContext": "manual",
    "ManualStrategy": "manual",
    "ModelParallelStrategy": "model_parallel",
    "Parallelized": "manual",
    "Pipeline": "pipeline",
    "PowerSGD": "ddp_hooks",
    "Precision": "precision.precision",
    "Route": "collectives.route",
    "SingleDeviceStrategy": "single",
    "SingleDeviceXLAStrategy": "xla_single",
    "Strategy": "strategy",
    "XLAFSDPStrategy": "xla_fsdp",
    "XLAModelParallelStrategy": "xla_model_parallel",
    "XLAStrategy": "xla",
    "along": "mesh",
    "available_strategies": "registry",
    "register_strategy": "registry",
}

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "FairScaleFSDPStrategy",
    "FairScaleShardedStrategy",
    "HorovodStrategy",
    "ManualContext",
    "ManualStrategy",
    "ModelParallelStrategy",
    "Parallelized",
    "Pipeline",
    "PowerSGD",
    "Precision",
    "Route",
    "SingleDeviceStrategy",
    "SingleDeviceXLAStrategy",
    "Strategy",
    "XLAFSDPStrategy",
    "XLAModelParallelStrategy",
    "XLAStrategy",
    "along",
    "available_strategies",
    "register_strategy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fabric.strategies' has no attribute {name!r}")
    return getattr(import_module(f"fabric.strategies.{_HOME[name]}"), name)
