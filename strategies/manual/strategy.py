"""`ManualStrategy`: the user's own function parallelises the model.

The module that the function returns is used as it is: nothing is moved, cast or wrapped, and a precision that requires
a cast raises if the function has not done it. Everything else works as under other strategies: launching, loaders,
backward, accumulation, clipping over plain and sharded parameters, unsharded checkpoints that any strategy reads. A
DTensor is treated by its placements, a plain tensor as a replica; if it differs between ranks, saving and clipping
raise.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.capabilities import Capability, Target
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.gradients.bare_parameters import IN_MODULE
from fabric.strategies.manual.manual_gradient_sync import ManualGradientSync
from fabric.strategies.manual.state import ManualState, own_parameters
from fabric.strategies.optimizers.owners import refuse_owners
from fabric.strategies.optimizers.rebinding import rebind
from fabric.strategies.options import check_function
from fabric.strategies.precision.precision import Precision, casts
from fabric.strategies.prepared import Prepared, replica
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import REPLICAS, SHARDS, Layout, Runtime
from fabric.strategies.sharding.fully_shard import fsdp_modules, reshard_roots
from fabric.strategies.sharding.mesh import COPIES, along, check_degrees
from fabric.strategies.tensors.parameters import parameters_of, uncompiled
from fabric.strategies.tensors.wrapper_subclass import is_wrapped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ManualContext:
    """This rank, its device, collectives and mesh."""

    world: World
    """The place of this process: rank, sizes, node."""
    device: torch.device
    """The device of this rank's tensors. Only `shard` moves tensors to it; the function moves the rest."""
    collective: Collective
    """The collective of all ranks."""
    mesh: "DeviceMesh"
    """The mesh of all ranks, with the axes of `ManualStrategy(mesh=...)`, for `fully_shard` and DTensors."""
    precision: Precision
    """The precision of `Fabric(precision=...)`."""

    def along(self, *axes: str) -> Collective:
        """The collective of the ranks that differ from this one only along `axes`. Ranks: all, with the same axes."""
        return along(self.collective, self.mesh, axes)

    def shard(self, parameter: nn.Parameter, dim: int = 0, axis: str | None = None) -> nn.Parameter:
        """Shard a parameter along an axis of the mesh: returns a DTensor on `device`, with the values of rank 0.

        Its `to_local()` is this rank's shard: with N rows and R ranks, rank r has at most ceil(N / R) rows, starting
        at r * ceil(N / R). It is replicated along other axes. `axis` may be omitted if the mesh has one axis only.
        Assign the result to the module, under the parameter's name. Ranks: all call it, in the same order.
        Raises: ValueError: an axis that does not exist.
        """
        from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

        axes = self.mesh.mesh_dim_names or ()
        chosen = axes[0] if axis is None and len(axes) == 1 else axis
        if chosen not in axes:
            names = ", ".join(map(repr, axes))
            raise ValueError(f"`shard(axis={axis!r})`: the mesh has the axes {names}. Name one of them.")
        placements: list[Placement] = [Shard(dim) if each == chosen else Replicate() for each in axes]
        cut = distribute_tensor(parameter.detach().to(self.device), self.mesh, placements)
        return nn.Parameter(cut, requires_grad=parameter.requires_grad)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelized:
    """The result of `parallelize`, if it returns more than the module."""

    module: nn.Module
    """The module that the loop calls: the one that the function was given, or another with its parameters."""
    averaged: nn.Module | Sequence[nn.Module] = ()
    """Submodules whose gradients are averaged over the ranks along the data axes after each backward. Gradients of
    plain parameters are averaged in a few all-reduces. Gradients of DTensors, which backward sums over the ranks that
    used them, are divided by the number of ranks. Plain parameters are broadcast from rank 0 at setup, and buffers
    after each backward. Modules within DistributedDataParallel, and gradients that FSDP2 averages, are skipped."""
    finish_backward: Callable[[], None] | None = None
    """Called after each backward outside of `no_backward_sync`, to synchronise gradients yourself."""
    unsynced: Callable[[], AbstractContextManager[object]] | None = None
    """Context that `no_backward_sync` enters. Not needed for `averaged`, `finish_backward`, DDP and FSDP2."""

    def __post_init__(self) -> None:
        for part in (self.module, *self.averaged_modules):
            if not isinstance(part, nn.Module):
                raise TypeError(
                    f"`Parallelized(...)` has a `{type(part).__name__}`, which is not a module. Pass modules; "
                    "`nn.ParameterList([...])` makes a module of parameters."
                )

    @property
    def averaged_modules(self) -> tuple[nn.Module, ...]:
        """`averaged` as a tuple."""
        return (self.averaged,) if isinstance(self.averaged, nn.Module) else tuple(self.averaged)


@final
@dataclass(frozen=True, kw_only=True)
class ManualStrategy(ProcessGroupStrategy):
    """Parallelism that the user implements.

    Args:
        parallelize: `parallelize(module, context)`, called by `setup` on every rank, once for each module. It modifies
            the module or makes another one, and returns it, or a `Parallelized`. In optimizers that exist already,
            replaced parameters are exchanged for those of the same name. Where ranks are spawned, the function must be
            importable.
        mesh: The axes of `context.mesh` and their degrees, whose product is the number of ranks; ranks are consecutive
            along the last axis. None: one axis, "data", over all ranks.
        data_axes: The axes along which ranks read different samples, and along which gradients are averaged
            (`Parallelized(averaged=...)`). None: all axes.
        reshard_roots: Free the parameters of the outermost `fully_shard` modules after forward, as those of inner
            ones. False: as the function wrote it; by torch's default they stay gathered until backward. See
            `FSDPStrategy.reshard_after_forward` for the consequences.
    """

    parallelize: Callable[[Any, ManualContext], nn.Module | Parallelized] | None = None
    mesh: Mapping[str, int] | None = None
    data_axes: tuple[str, ...] | None = None
    reshard_roots: bool = True

    def __post_init__(self) -> None:
        check_function(self, "parallelize", "parallelize(module, context)")
        axes = self._axes(1)
        unknown = [axis for axis in self.data_axes or () if axis not in axes]
        if unknown:
            raise ValueError(
                f"`ManualStrategy(data_axes={self.data_axes!r})` names {unknown[0]!r}, but the mesh has the axes "
                f"{', '.join(map(repr, axes))}. Name some of these, or leave it out for all of them."
            )

    @property
    def lacks(self) -> Mapping[Capability, str]:
        copies = any(number > 1 and not self.has_own_data(axis) for axis, number in self._axes(1).items())
        always: dict[Capability, str] = {"bare_parameters": IN_MODULE}
        return {**always, "gather_gradients": COPIES} if copies else always

    @property
    def needs_function(self) -> bool:
        return self.parallelize is None

    def why_not(self, target: Target) -> str | None:
        if self.needs_function:
            return (
                "`strategy='manual'` parallelises the model by a function of yours, and has none. Pass "
                "`strategy=ManualStrategy(parallelize=function)` (from `fabric.strategies`), where "
                "`function(module, context)` returns the module to train."
            )
        return None

    def degrees(self, size: int, num_nodes: int) -> dict[str, int]:
        degrees = self._axes(size)
        check_degrees(degrees, size, written=f"ManualStrategy(mesh={self.mesh!r})")
        return degrees

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        return replace(SHARDS, weights="any")

    def has_own_data(self, axis: str) -> bool:
        return self.data_axes is None or axis in self.data_axes

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        assert runtime.mesh is not None
        context = ManualContext(
            world=runtime.world,
            device=runtime.device,
            collective=runtime.collective,
            mesh=runtime.mesh,
            precision=runtime.precision,
        )
        given = uncompiled(module)
        before = own_parameters(given)
        parallel = self._parallelized(module, context)
        if self.reshard_roots:
            reshard_roots(parallel.module)
        after = own_parameters(given)
        rebind(before, after, optimizers)
        refuse_owners(optimizers, "the model that `parallelize` returned")
        _refuse_left_behind(optimizers, parallel.module, (before, after))
        _refuse_other_dtypes(runtime.precision, parallel.module)
        data_axes = tuple(filter(self.has_own_data, self._axes(runtime.world.size)))
        sync = ManualGradientSync(context, parallel, data_axes)
        prepared = replica(runtime, parallel.module, optimizers, sync)
        clip = prepared.clip_norm
        compared = WeakSet[Optimizer]()

        def clip_norm(of: Sequence[Optimizer], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
            norm = clip(of, max_norm, norm_type, error_if_nonfinite)
            if not compared.issuperset(of):  # averaging does not change later
                _refuse_unequal(torch.tensor(runtime.collective.all_gather_object(norm.item())))
                compared.update(of)
            return norm

        layout = REPLICAS if sync.is_replicated else runtime.layout
        communicates = runtime.share.count > 1 and bool(fsdp_modules(parallel.module))
        return replace(
            prepared,
            clip_norm=clip_norm,
            layout=replace(layout, forward_communicates=communicates),
            state=ManualState(runtime.collective),
        )

    def _axes(self, size: int) -> dict[str, int]:
        return {"data": size} if self.mesh is None else dict(self.mesh)

    def _parallelized(self, module: nn.Module, context: ManualContext) -> Parallelized:
        assert self.parallelize is not None  # see `refuse`
        made = self.parallelize(module, context)
        if isinstance(made, Parallelized):
            return made
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"`parallelize(module, context)` returned {made!r}. Return the module to train, even "
                "if it is the one that was passed, or a `Parallelized`."
            )
        return Parallelized(module=made)


def _refuse_left_behind(
    optimizers: Sequence[Optimizer], module: nn.Module, given: Sequence[Mapping[str, nn.Parameter]]
) -> None:
    """Raise ValueError if an optimizer has a parameter of the passed module that the returned one does not have."""
    names: dict[Tensor, str] = {parameter: name for parameters in given for name, parameter in parameters.items()}
    trained = set(module.parameters())
    for optimizer in optimizers:
        left = [parameter for parameter in parameters_of(optimizer) if parameter in names and parameter not in trained]
        if left:
            raise ValueError(
                f"The `{type(optimizer).__name__}` holds `{names[left[0]]}`, which the `{type(module).__name__}` that "
                f"`parallelize` returned does not have, and no parameter replaces it under that name. Set up the "
                "module first, and make the optimizer from the result: `model = fabric.setup_module(model)`, then "
                "`optimizer = fabric.setup_optimizers(SGD(model.parameters(), ...))`."
            )


def _refuse_other_dtypes(precision: Precision, module: nn.Module) -> None:
    """Raise ValueError if a `-true` precision requires a dtype that the function has not cast to."""
    if not casts(precision):
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype != precision.param_dtype and not is_wrapped(tensor):
            raise ValueError(
                f"`precision={precision.name!r}` asks for {precision.param_dtype}, but `{name}` came back as "
                f"{tensor.dtype}. Cast it in your function: `module.to(context.precision.param_dtype)`."
            )


def _refuse_unequal(norms: Tensor) -> None:
    """Raise RuntimeError if ranks clip by different norms. Equal gradients may have been summed in another order."""
    if not torch.allclose(norms, norms[:1], rtol=1e-3, atol=0.0, equal_nan=True):
        raise RuntimeError(
            f"The norm of all gradients differs between the ranks ({', '.join(f'{norm:.4g}' for norm in norms)}), and "
            "each would clip by another. If a plain parameter is a rank's own shard, make it a DTensor "
            "(`context.shard`, or your own). If it is a replica, average its gradient (`Parallelized(averaged=...)`)."
        )
