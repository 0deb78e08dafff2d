"""Data parallelism over Horovod: a replica in every process; gradients are averaged at the end of backward.

Horovod (Sergeev and Del Balso, arXiv:1802.05799) averages in an optimizer that wraps the user's. Here the user's
optimizer stays unwrapped: clipping after backward, or a closure, reads averaged gradients. A parameter that no rank has
used has no gradient, as in one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Capability, Target
from fabric.strategies.horovod.collective import OF_ALL_RANKS, HorovodCollective
from fabric.strategies.horovod.horovod_gradient_sync import HorovodGradientSync
from fabric.strategies.options import own_launchers
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared, place, replica
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.strategy import Strategy

_INSTALL = (
    "Release 0.28.1 does not compile against today's torch by itself. In torchfabric's repository, run "
    "`tests/over_horovod/build_wheel.sh python wheels && pip install wheels/horovod-*.whl` (two minutes)."
)


@final
@dataclass(frozen=True, kw_only=True)
class HorovodStrategy(Strategy):
    """Data parallelism over Horovod: one process per device, started by any launcher, including `horovodrun`.

    Args:
        launcher: How processes are started: auto (as `Fabric(launcher=...)` says), script, fork, forkserver or spawn.
        timeout_seconds: How long a collective waits for the other ranks before it raises, naming the missing ones.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 whenever gradients are
            averaged.
    """

    launcher: str = "auto"
    timeout_seconds: float = 1800.0
    broadcast_buffers: bool = True

    @property
    def lacks(self) -> Mapping[Capability, str]:
        return {"collective": OF_ALL_RANKS}

    def look_for_packages(self) -> Mapping[str, str]:
        """Imports Horovod: only its module tells the backends that it was built with."""
        try:
            import horovod.torch as hvd
        except (ImportError, OSError) as error:
            return {"horovod cannot be imported": str(error)}
        built = {"gloo": hvd.gloo_built(), "nccl": hvd.nccl_built()}
        return {"horovod": " ".join(name for name, is_built in built.items() if is_built)}

    @property
    def launchers(self) -> tuple[str, ...]:
        return own_launchers(self.launcher)

    def refuse(self, target: Target) -> str | None:
        return _why_not(target)

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        accelerator.set_device(devices[world.local_rank])
        device = accelerator.device(devices[world.local_rank])
        return open_runtime(world, [device], HorovodCollective(world, timeout_seconds=self.timeout_seconds), precision)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, move=move)
        return replica(
            runtime, module, optimizers, HorovodGradientSync(runtime.collective, module, self.broadcast_buffers)
        )


def _why_not(target: Target) -> str | None:
    """None if Horovod can run on this device; otherwise the reason, with what to install or to write."""
    built, device_type = target.packages.get("horovod"), target.accelerator.device(0).type
    if built is None:
        error = target.packages.get("horovod cannot be imported", "it was not looked for")
        return f"`strategy='horovod'` needs Horovod, which cannot be imported here: {error}. {_INSTALL}"
    if "gloo" not in built:
        return f"`strategy='horovod'` needs Horovod with its gloo controller, which the installed one lacks. {_INSTALL}"
    if device_type == "cpu" or (device_type == "cuda" and "nccl" in built):
        return None
    return (
        f"`strategy='horovod'` with `accelerator={device_type!r}`: Horovod supports tensors on the CPU, and on CUDA "
        "if it was built with HOROVOD_GPU_OPERATIONS=NCCL. Pass `accelerator='cpu'`, or use 'ddp'."
    )
