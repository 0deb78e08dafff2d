"""One process, one XLA device: the plain loop, with steps marked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared, replica
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.xla.device import (
    XLAState,
    marked_batches,
    place,
    prepare_module,
    prepare_optimizers,
    refuse_accelerator,
)
from fabric.strategies.xla.torch_xla_strategy import TorchXLAStrategy


@final
@dataclass(frozen=True, kw_only=True)
class SingleDeviceXLAStrategy(TorchXLAStrategy):
    """The model on one XLA device, in the calling process, which cannot launch replicas afterwards."""

    def refuse(self, target: Target) -> str | None:
        sentence = refuse_accelerator("single_xla", target)
        if sentence is not None or target.size == 1:
            return sentence
        return (
            f"`strategy='single_xla'` uses one device, but `devices={target.num_devices}` and "
            f"`num_nodes={target.num_nodes}` make {target.size}. Pass `devices=1`, or "
            "`strategy='xla'` to train on all of them."
        )

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        accelerator.set_device(devices[0])
        accelerator.seed()
        return open_runtime(
            world, [accelerator.device(devices[0])], SingleDeviceCollective(), precision, carry=marked_batches
        )

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, to_device=move)
        undo = prepare_module(module, optimizers)
        return replace(replica(runtime, module, optimizers, end=undo), state=XLAState())

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        return prepare_optimizers(runtime, optimizers)
