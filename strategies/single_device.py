"""One process, one device: the plain loop, with the fabric's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.data.share import Use
from fabric.strategies.module.initialization import new_tensors
from fabric.strategies.module.prepare import attach_scaler, place, replica, share_loader
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime, connect
from fabric.strategies.strategy import Strategy


@final
@dataclass(frozen=True, kw_only=True)
class SingleDeviceStrategy(Strategy):
    """The whole model on one device of one process."""

    @property
    def launchers(self) -> tuple[str, ...]:
        return ("inline",)

    def num_processes(self, num_devices: int) -> int:
        return 1

    def refuse(self, accelerator: Accelerator, num_devices: int, num_nodes: int, precision: Precision) -> str | None:
        if num_devices * num_nodes == 1:
            return None
        return (
            f"`strategy='single_device'` uses one device, but `devices={num_devices}` and `num_nodes={num_nodes}` make "
            f"{num_devices * num_nodes}. Pass `devices=1`, or `strategy='ddp'` to train on all of them."
        )

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        accelerator.connect(devices[0])
        return connect(world, [accelerator.device(devices[0])], SingleDeviceCollective(), precision)

    def init_module(self, runtime: Runtime, *, empty: bool) -> AbstractContextManager[None]:
        return new_tensors(runtime.device, runtime.precision, empty=empty)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, move=move)
        return replica(runtime, module, optimizers)

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        return attach_scaler(runtime.loss_scaler, optimizers)

    def process_dataloader(
        self, runtime: Runtime, loader: Iterable[Any], use: Use, *, distribute: bool, move: bool
    ) -> Iterable[Any]:
        return share_loader(runtime, loader, use, distribute=distribute, move=move)
