"""Data parallelism over XLA: a replica on every device; gradients are averaged after each backward.

On a TPU a replica is a process, on PJRT's CPU client a thread; the code here is the same. A step is three graphs:
forward with backward, the averages, the optimizer. In one graph the averages could overlap with backward; but a rank
that alone reads a loss would then run another graph than the others, and collectives match only in equal graphs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Capability, Target
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared, replica
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.xla.collective import OF_ALL_REPLICAS, XLACollective
from fabric.strategies.xla.device import (
    XLAState,
    marked_batches,
    place,
    prepare_module,
    prepare_optimizers,
    refuse_accelerator,
)
from fabric.strategies.xla.torch_xla_strategy import TorchXLAStrategy
from fabric.strategies.xla.xla_gradient_sync import UNUSED, XLAGradientSync


@final
@dataclass(frozen=True, kw_only=True)
class XLAStrategy(TorchXLAStrategy):
    """Data parallelism over XLA: a replica of the model on each device, with its own share of the data.

    Args:
        timeout_seconds: How long the ranks wait for each other in `launch`.
        find_unused_parameters: All-reduce after each backward which parameters have gradients, and count missing ones
            as zero. Costs an all-reduce that the host waits for. False: a parameter that is used only in some steps
            raises.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 after each forward that
            computes gradients.
        cpu_replicas: Allow several replicas on PJRT's CPU client, which hangs in the first collective of torch_xla 2.9
            as released. For builds that fix it, such as the build of our tests.
    """

    launcher_name: ClassVar[str] = "xla"
    timeout_seconds: float = 1800.0
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    cpu_replicas: bool = False

    @property
    def lacks(self) -> Mapping[Capability, str]:
        always = {**super().lacks, "collective": OF_ALL_REPLICAS}
        return always if self.find_unused_parameters else {**always, "unused": UNUSED}

    def refuse(self, target: Target) -> str | None:
        sentence = refuse_accelerator("xla", target)
        if sentence is not None or target.size == 1:
            return sentence
        if target.num_devices != target.num_available:
            return (
                f"`devices={target.num_devices}` with `strategy='xla'`, but PJRT has "
                f"{target.num_available} devices here, and runs a replica on each. Leave `devices` out, or show "
                "PJRT fewer: by CPU_NUM_DEVICES, or by TPU_VISIBLE_CHIPS on a TPU."
            )
        if target.platform == "CPU" and not self.cpu_replicas:
            return (
                f"`strategy='xla'` with {target.num_devices} replicas on PJRT_DEVICE=CPU: "
                "torch_xla 2.9 hangs there in the first collective, and ends the process after 15 s. Write "
                "`strategy='xla_fsdp'`, which is one program over all devices, or `devices=1`; on a TPU `xla` runs on "
                "all."
            )
        return None

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        import torch_xla

        if world.size == 1:
            accelerator.set_device(devices[0])
        device = torch_xla.device()  # that of this replica, a process or a thread
        accelerator.seed()
        several = XLACollective(world, timeout_seconds=self.timeout_seconds)
        collective = several if world.size > 1 else SingleDeviceCollective()
        return open_runtime(world, [device], collective, precision, carry=marked_batches)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, to_device=move)
        sync = None
        if isinstance(runtime.collective, XLACollective):
            sync = XLAGradientSync(
                runtime.collective,
                module,
                find_unused_parameters=self.find_unused_parameters,
                broadcast_buffers=self.broadcast_buffers,
            )
        undo = prepare_module(module, optimizers)
        return replace(replica(runtime, module, optimizers, sync, end=undo), state=XLAState(runtime.world.size))

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        return prepare_optimizers(runtime, optimizers)
