"""Strategies, with the names and arguments of Lightning Fabric. Each has one of the core: `strategy.core`."""

from __future__ import annotations

from fabric.lightning.strategies.ddp import DataParallelStrategy, DDPStrategy
from fabric.lightning.strategies.deepspeed import DeepSpeedStrategy
from fabric.lightning.strategies.fsdp import FSDPStrategy
from fabric.lightning.strategies.model_parallel import ModelParallelStrategy
from fabric.lightning.strategies.strategy import ParallelStrategy, SingleDeviceStrategy, Strategy
from fabric.lightning.strategies.xla import SingleDeviceXLAStrategy, XLAFSDPStrategy, XLAStrategy
from fabric.strategies.strategy import Strategy as CoreStrategy

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "SingleDeviceXLAStrategy",
    "Strategy",
    "XLAFSDPStrategy",
    "XLAStrategy",
    "strategy_of",
]

_KINDS: dict[str, type[Strategy]] = {
    "DDPStrategy": DDPStrategy,
    "DataParallelStrategy": DataParallelStrategy,
    "DeepSpeedStrategy": DeepSpeedStrategy,
    "FSDPStrategy": FSDPStrategy,
    "ModelParallelStrategy": ModelParallelStrategy,
    "SingleDeviceStrategy": SingleDeviceStrategy,
    "SingleDeviceXLAStrategy": SingleDeviceXLAStrategy,
    "XLAFSDPStrategy": XLAFSDPStrategy,
    "XLAStrategy": XLAStrategy,
}
"""Classes by the name of the core's class."""


def strategy_of(core: CoreStrategy) -> Strategy:
    """The core's strategy as an instance of Lightning Fabric's class name; `Strategy` if it has none."""
    return _KINDS.get(type(core).__name__, Strategy).holding(core)
