"""`ModelParallelStrategy`, with that library's axes: `mesh["data_parallel"]` and `mesh["tensor_parallel"]`."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, final

from torch import nn

from fabric import strategies as core_strategies
from fabric.lightning.strategies.strategy import ParallelStrategy, process_options

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ModelParallelStrategy(ParallelStrategy):
    """A mesh of two axes, over which `parallelize_fn(model, mesh)` parallelises the model.

    A size may be "auto". Both: `data_parallel` is the number of nodes, `tensor_parallel` that of devices per node. One:
    the remaining ranks. `save_distributed_checkpoint`: `fabric.save` writes a folder with the shards of each rank.
    """

    def __init__(
        self,
        parallelize_fn: "Callable[[Any, DeviceMesh], Any]",
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.saves_shards = bool(save_distributed_checkpoint)
        self._options = {
            **process_options("ModelParallelStrategy", locals()),
            "parallelize_fn": _WithNames(parallelize_fn),
        }
        self._sizes = (data_parallel_size, tensor_parallel_size)

    def core(self, num_nodes: int) -> core_strategies.Strategy:
        """The core's strategy: its axes are "shard" and "tensor"."""
        if "_core" in vars(self):
            return self._core
        data, tensor = self._sizes
        if (data, tensor) == ("auto", "auto"):
            data = num_nodes
        return core_strategies.ModelParallelStrategy(shard=data, tensor=tensor, **self._options)

    @property
    def device_mesh(self) -> "DeviceMesh | None":
        """The ranks along `data_parallel` and `tensor_parallel`."""
        mesh = self._within.device_mesh
        has_core_axes = "_sizes" not in vars(self)  # made by the core's name, whose function uses the core's axes
        return mesh if mesh is None or has_core_axes else with_names(mesh)


@final
@dataclass(frozen=True)
class _WithNames:
    """Calls the user's function with that library's names of the axes."""

    function: "Callable[[Any, DeviceMesh], Any]"

    def __call__(self, model: nn.Module, mesh: "DeviceMesh") -> Any:
        return self.function(model, with_names(mesh))


def with_names(mesh: "DeviceMesh") -> "DeviceMesh":
    """The mesh of two axes over the process groups of the core's mesh. No communication."""
    from torch.distributed.device_mesh import DeviceMesh

    assert mesh.mesh_dim_names is not None
    sizes = [mesh.size(mesh.mesh_dim_names.index(axis)) for axis in ("shard", "tensor")]
    return DeviceMesh.from_group(
        [mesh.get_group("shard"), mesh.get_group("tensor")],
        mesh.device_type,
        mesh=mesh.mesh.reshape(sizes),
        mesh_dim_names=("data_parallel", "tensor_parallel"),
    )
