"""What every strategy with one process per device and a torch process group shares.

A subclass adds its options, `setup`, and the hooks in which it differs. Subclasses do not override `final` methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.data.partition import Share
from fabric.strategies.options import own_launchers
from fabric.strategies.precision.precision import Precision
from fabric.strategies.runtime import REPLICAS, Layout, Runtime, open_runtime
from fabric.strategies.sharding.mesh import degree, device_mesh
from fabric.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class ProcessGroupStrategy(Strategy):
    """One process per device, and a torch process group over all ranks.

    Args:
        launcher: How processes are started: auto (as `Fabric(launcher=...)` says), script, fork, forkserver or spawn.
        backend: The backend of torch.distributed. None: the accelerator's own, gloo on the CPU and nccl on CUDA.
        timeout_seconds: How long a collective waits for the other ranks before it raises.
    """

    launcher: str = "auto"
    backend: str | None = None
    timeout_seconds: float = 1800.0

    def why_not(self, target: Target) -> str | None:
        """Hook: the reason why this strategy cannot run on the target, as in `refuse`; None if it can."""
        return None

    def degrees(self, size: int, num_nodes: int) -> Mapping[str, int]:
        """Hook: the sizes of the mesh's axes, the last one over adjacent ranks; empty without a mesh.

        Raises: ValueError: their product is not `size`, or they contradict the options.
        """
        return {}

    def has_own_data(self, axis: str) -> bool:
        """Hook: whether ranks along this axis of the mesh read different samples."""
        return True

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        """Hook: how models lie over the ranks. `degrees`: the sizes of the mesh's axes."""
        return REPLICAS

    def when_connected(self, runtime: Runtime) -> None:
        """Hook: called on every rank once the process group exists."""

    @final
    @property
    def launchers(self) -> tuple[str, ...]:
        """The launcher set by the option, or all that start a process per device."""
        return own_launchers(self.launcher)

    @final
    def refuse(self, target: Target) -> str | None:
        """The reasons of `why_not` and `degrees`; refuses MPS if a process group is needed."""
        sentence = self.why_not(target)
        if sentence is not None:
            return sentence
        try:
            layout = self.layout(self.degrees(target.size, target.num_nodes))
        except ValueError as error:
            return str(error)
        if target.accelerator.name == "mps" and (target.size > 1 or layout.gradients == "shards"):
            return (
                f"`accelerator='mps'` has one device and no torch.distributed backend, which `{type(self).__name__}` "
                "needs. Pass `accelerator='cpu'`, or `devices=1` and `strategy='single_device'`."
            )
        return None

    @final
    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        """Select this rank's device, join the process group, and create the mesh if there is one."""
        degrees = self.degrees(world.size, world.num_nodes)
        index = devices[world.local_rank]
        accelerator.set_device(index)
        device = accelerator.device(index)
        backend = self.backend or accelerator.backend
        collective = TorchCollective(world, backend, device=device, timeout_seconds=self.timeout_seconds)
        runtime = open_runtime(world, [device], collective, precision, layout=self.layout(degrees))
        if degrees:
            mesh = device_mesh(device, degrees)
            runtime = replace(runtime, mesh=mesh, share=self._share(mesh))
        self.when_connected(runtime)
        return runtime

    def _share(self, mesh: "DeviceMesh") -> Share:
        """This rank's share of the data; the last axis varies fastest."""
        share = Share()
        for axis in filter(self.has_own_data, mesh.mesh_dim_names or ()):
            num_ranks = degree(mesh, axis)
            share = Share(index=share.index * num_ranks + mesh.get_local_rank(axis), count=share.count * num_ranks)
        return share
