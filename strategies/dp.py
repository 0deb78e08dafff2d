"""The whole model on several devices of one process: each forward copies the model and splits the batch.

For notebooks and old scripts. One process drives all devices, so `ddp` is faster wherever it can run.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.gradients.sync import LocalGradientSync
from fabric.strategies.module.activation_offload import rebind_copies
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared, place, replica
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.strategy import Strategy


@final
@dataclass(frozen=True, kw_only=True)
class DataParallelStrategy(Strategy):
    """Data parallel within one process: a world of one rank with several devices. Outputs are gathered on the first."""

    launchers = ("inline",)

    def refuse(self, target: Target) -> str | None:
        if target.num_nodes > 1:
            return (
                f"`strategy='dp'` is one process, but `num_nodes={target.num_nodes}` needs one per node. "
                "Pass `strategy='ddp'`."
            )
        if target.accelerator.name == "cpu" and target.num_devices > 1:
            number = target.num_devices
            return (
                f"`strategy='dp'` splits a batch over devices of one process, and the CPU is one device, but "
                f"`devices={number}` asks for more. Pass `strategy='ddp'` for {number} processes."
            )
        return None

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        accelerator.set_device(devices[0])
        return open_runtime(
            world, [accelerator.device(index) for index in devices], SingleDeviceCollective(), precision
        )

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, move=move)
        if len(runtime.devices) == 1:
            return replica(runtime, module, optimizers)
        # Splits the batch of each forward; autograd sums the gradients of the copies on the first device.
        parallel = DataParallel(_Copy(module), device_ids=list(runtime.devices))
        return replica(runtime, module, optimizers, LocalGradientSync(module, parallel))


@final
class _Copy(nn.Module):
    """The module that DataParallel copies to each device; calls the method on the copy there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rebind_copies(self.module)
        vars(self.module).pop("forward", None)  # the copy has our attribute, which is bound to the original module
        return inspect.unwrap(function).__func__(self.module, *args, **kwargs)
