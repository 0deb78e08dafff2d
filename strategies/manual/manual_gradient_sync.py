"""Gradient synchronisation of a model that the user's `parallelize` function has parallelized.

# Note [Shards are divided as they arrive]
Backward sums the gradient of a shard over the ranks that used it. For the mean of the ranks' losses it must be divided
by their number, each contribution once. So a tensor hook divides each new gradient before it is accumulated: unlike an
average (see Note [Averages of averages]), a division must not be repeated within an accumulation window.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero, buffers_of
from fabric.strategies.gradients.sync import (
    GRAPH_OF_GRADIENTS,
    INPUTS_OF_SHARDS,
    Finish,
    GradientSync,
    average,
    end_reducer,
    on_gradient,
)
from fabric.strategies.manual.state import own_parameters
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.sharding.fully_shard import GatherOutsideInference, fsdp_modules
from fabric.strategies.sharding.mesh import along, axes_of, degree
from fabric.strategies.sharding.sharded_gradient_sync import rehearsed
from fabric.strategies.tensors.dtensor import as_sharded

if TYPE_CHECKING:
    from fabric.strategies.manual.strategy import ManualContext, Parallelized


@final
class ManualGradientSync(GradientSync):
    """Synchronises one model. `data_axes`: the axes of the mesh along which ranks read different samples."""

    def __init__(self, context: "ManualContext", parallel: "Parallelized", data_axes: Sequence[str]) -> None:
        self.context, self.parallel = context, parallel
        self.data_axes = [axis for axis in data_axes if degree(context.mesh, axis) > 1]
        self.replicas = [part for part in parallel.module.modules() if isinstance(part, DistributedDataParallel)]
        self.fsdp_units = fsdp_modules(parallel.module)
        self.refuses = {
            **(INPUTS_OF_SHARDS if self.fsdp_units else {}),
            **(GRAPH_OF_GRADIENTS if self.replicas else {}),
        }
        self.gather_outside_inference = GatherOutsideInference(self.fsdp_units)
        self.expected = False
        self.names: dict[Tensor, str] = {each: name for name, each in own_parameters(parallel.module).items()}
        theirs = {tensor for replica in self.replicas for tensor in _tensors_of(replica)}
        modules = parallel.averaged_modules
        ours = list(dict.fromkeys(each for part in modules for each in part.parameters() if each not in theirs))
        self.theirs, self.buffered = theirs, [part for module in modules for part in module.modules()]
        broadcast_from_rank_zero(
            context.collective, [*(each for each in ours if as_sharded(each) is None), *self._buffers()]
        )
        self.averaged: dict[tuple[str, ...], list[nn.Parameter]] = {}
        self.hooks: list[RemovableHandle] = []
        self.kept_hook = self._arrived
        for parameter in ours:
            self._arrange(parameter)
        self.along = {axes: along(context.collective, context.mesh, axes).for_gradients() for axes in self.averaged}
        self.additions = AddedParameters(parallel.module, by_name=bool(self.fsdp_units))
        self.unfrozen = [AddedParameters(replica.module, unfrozen=True) for replica in self.replicas]

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.parallel.averaged_modules or self.replicas or self.fsdp_units:
            self.additions.refuse()
        for replica in self.unfrozen:
            replica.refuse("Do that before `setup`: DistributedDataParallel averages what required gradients then.")
        return function(*args, **kwargs)

    @property
    def is_replicated(self) -> bool:
        """Whether all ranks hold the same whole parameters, and average their gradients over all ranks."""
        averaged = set(self.averaged.get(tuple(self.data_axes), ()))
        size = math.prod(degree(self.context.mesh, axis) for axis in self.data_axes)
        return size == self.context.world.size and averaged.issuperset(self.parameters_held())

    def watch(self) -> Finish | None:
        self.expected = self.synced
        return self._finish if self.synced else None

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        parallel = self.parallel
        known = (parallel.averaged_modules, parallel.finish_backward, parallel.unsynced, self.replicas, self.fsdp_units)
        if self.context.world.size > 1 and not any(known):
            raise RuntimeError(
                f"`no_backward_sync` of a `{type(parallel.module).__name__}` whose gradients are synchronised in a "
                "way that only your function knows. Return `Parallelized(module=..., unsynced=...)` with a context in "
                "which they are not, or let `averaged`, `finish_backward`, DistributedDataParallel or `fully_shard` "
                "synchronise them."
            )
        with ExitStack() as stack:
            for part in self.replicas:
                stack.enter_context(part.no_sync())
            if parallel.unsynced is not None:
                stack.enter_context(parallel.unsynced())
            stack.enter_context(super().unsynced())
            yield

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(setattr, self, "expected", False)
            for part in self.replicas:  # whose reducer waits for messages in C++
                stack.enter_context(part.no_sync())
            stack.enter_context(rehearsed(self.fsdp_units))
            yield

    def parameters_held(self) -> Iterable[Tensor]:
        return self.parallel.module.parameters()

    def release(self) -> None:
        for handle in self.hooks:
            handle.remove()
        self.gather_outside_inference.release()
        for part in self.replicas:
            end_reducer(part)

    def _arrived(self, parameter: Tensor) -> None:
        """Autograd hook: called in each backward, for each parameter whose gradient is averaged after it."""
        if self.synced and not self.expected:
            raise RuntimeError(
                f"`loss.backward()` computes the gradient of `{self.names[parameter]}`, which is averaged over the "
                "ranks after `fabric.backward(loss)`. Call that."
            )

    def _finish(self) -> None:
        self.expected = False
        for axes, parameters in self.averaged.items():
            average(self.along[axes], parameters)
        broadcast_from_rank_zero(self.context.collective, self._buffers())
        if self.parallel.finish_backward is not None:
            self.parallel.finish_backward()

    def _buffers(self) -> list[Tensor]:
        return [buffer for buffer in buffers_of(self.buffered) if buffer not in self.theirs]

    def _arrange(self, parameter: nn.Parameter) -> None:
        """Divide a parameter's gradient by the ranks it is sharded over, and average it along the other data axes."""
        mesh, cut = self.context.mesh, self._cut_along(parameter)
        num_ranks = math.prod(degree(mesh, axis) for axis in self.data_axes if axis in cut)
        if num_ranks > 1:
            self.hooks.append(_divide_arriving(parameter, num_ranks))
        rest = tuple(axis for axis in self.data_axes if axis not in cut)
        if rest:
            self.averaged.setdefault(rest, []).append(parameter)
            self.hooks.append(on_gradient(parameter, self.kept_hook))

    def _cut_along(self, parameter: nn.Parameter) -> set[str]:
        sharded = as_sharded(parameter)
        if sharded is None:
            return set()
        axes = axes_of(sharded.device_mesh, self.context.mesh)
        if axes is None:
            raise ValueError(
                f"`{self.names[parameter]}` is sharded over ranks that no axis of {self.context.mesh} connects. "
                "Make it on `context.mesh`, or on a submesh of that."
            )
        dims = zip(sharded.placements, axes, strict=True)
        return {axis for placement, of_dim in dims if placement.is_shard() for axis in of_dim}


def _divide_arriving(parameter: nn.Parameter, num_ranks: int) -> RemovableHandle:
    """Divide each new gradient: see Note [Shards are divided as they arrive]."""
    required = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one accepts no hook, and may be unfrozen later
    handle: RemovableHandle = parameter.register_hook(lambda grad: grad / num_ranks)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(required)
    return handle


def _tensors_of(replica: DistributedDataParallel) -> Iterator[Tensor]:
    """The tensors that DistributedDataParallel averages or broadcasts."""
    tensors = (*replica.module.named_parameters(), *replica.module.named_buffers())
    return (tensor for name, tensor in tensors if name not in replica.parameters_to_ignore)
