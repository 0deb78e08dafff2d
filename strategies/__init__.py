"""How a model lies over devices: the strategies, and the parts they are composed of.

The names below are imported when they are first used: a strategy's backend costs nothing to who does not use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric.strategies.ddp import DDPStrategy as DDPStrategy
    from fabric.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from fabric.strategies.dp import DataParallelStrategy as DataParallelStrategy
    from fabric.strategies.fairscale_ddp import FairScaleShardedStrategy as FairScaleShardedStrategy
    from fabric.strategies.fairscale_fsdp import FairScaleFSDPStrategy as FairScaleFSDPStrategy
    from fabric.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from fabric.strategies.precision.precision import Precision as Precision
    from fabric.strategies.registry import available_strategies as available_strategies
    from fabric.strategies.registry import register_strategy as register_strategy
    from fabric.strategies.single import SingleDeviceStrategy as SingleDeviceStrategy
    from fabric.strategies.strategy import Strategy as Strategy

_HOME = {
    "DDPStrategy": "ddp",
    "DataParallelStrategy": "dp",
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "FairScaleFSDPStrategy": "fairscale_fsdp",
    "FairScaleShardedStrategy": "fairscale_ddp",
    "Precision": "precision.precision",
    "SingleDeviceStrategy": "single",
    "Strategy": "strategy",
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
    "Precision",
    "SingleDeviceStrategy",
    "Strategy",
    "available_strategies",
    "register_strategy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fabric.strategies' has no attribute {name!r}")
    return getattr(import_module(f"fabric.strategies.{_HOME[name]}"), name)
