"""One process, one device: plain PyTorch through the methods of `Fabric`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.gradients.sync import LocalGradientSync
from fabric.strategies.module.forward import Around
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared, place, replica
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.strategy import Strategy


@final
@dataclass(frozen=True, kw_only=True)
class SingleDeviceStrategy(Strategy):
    """The whole model on one device of one process.

    Args:
        run: What runs `forward`, if not `forward` itself: it is called as `run(forward, args, kwargs)`.
    """

    launchers = ("inline",)
    run: Around | None = None

    def refuse(self, target: Target) -> str | None:
        if target.size == 1:
            return None
        return (
            f"`strategy='single_device'` uses one device, but `devices={target.num_devices}` and "
            f"`num_nodes={target.num_nodes}` make {target.size}. Pass `devices=1`, or "
            "`strategy='ddp'` to train on all of them."
        )

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        accelerator.set_device(devices[0])
        return open_runtime(world, [accelerator.device(devices[0])], SingleDeviceCollective(), precision)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, move=move)
        return replica(runtime, module, optimizers, self.run and LocalGradientSync(module, self.run))
