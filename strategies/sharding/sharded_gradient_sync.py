"""Forward and backward of one model in shards: `fully_shard` and tensor parallelism communicate; this class checks the
order of submodules, and averages gradients that they do not.

# Note [Gradients not reduced yet]
Within `no_backward_sync` gradients accumulate on the gathered copies of parameters, where `zero_grad` does not reach
them. Meanwhile the gradient of a shard is a `GradientPlaceholder`: if that is zeroed or replaced, the accumulated
gradient is discarded.

# Note [Parameters that some ranks do not use]
torch packs a rank's gradients of one unit side by side, and sums those of all ranks by position. So each rank sends
zeros for the parameters that it did not use (from torch 2.13 on; with an older torch, ranks that used different
parameters raise). A parameter that no rank used gets None again, as in plain PyTorch: an optimizer would change it even
if its gradient is zero. Only a rank that did not use one waits for the other ranks' answer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero, buffers_of
from fabric.strategies.gradients.sync import (
    INPUTS_OF_SHARDS,
    NOT_ALONE,
    Finish,
    GradientSync,
    all_of,
    average,
    redistribute,
)
from fabric.strategies.module.initialization import UninitializedTensors
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder, start_comparing
from fabric.strategies.sharding.fully_shard import GatherOutsideInference, fsdp_modules
from fabric.strategies.sharding.mesh import DATA_AXES, along, degree, unaveraged
from fabric.strategies.tensors.dtensor import local_part, user_class
from fabric.strategies.tensors.gradient_placeholder import GradientPlaceholder
from fabric.strategies.torch_internals import require_fully_shard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_gradient = attrgetter("grad")


@final
class ShardedGradientSync(GradientSync):
    """One model. `averaging`: averages gradients that no unit reduces; None: the root is a unit, and reduces all."""

    def __init__(
        self,
        runtime: Runtime,
        module: nn.Module,
        uninitialized: UninitializedTensors,
        averaging: "MeshAveraging | None" = None,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.collective, self.module = runtime.collective, module
        self.uninitialized, self.averaging = uninitialized, averaging
        self.data = runtime.collective if averaging is None else averaging.data
        self.buffered = list(module.modules()) if broadcast_buffers and runtime.world.size > 1 else []
        self.fsdp_units = units = fsdp_modules(module)
        self.refuses = INPUTS_OF_SHARDS if units else {}
        self.additions = AddedParameters(module, by_name=bool(units))
        self.gather_outside_inference = GatherOutsideInference(units)
        self.order = ExecutionOrder(runtime, module, units)
        self.reductions = UnreducedGradients(runtime, module, units)
        self.parameters = list(module.parameters())  # the shards; `fully_shard` may replace them by gathered parameters
        self._ordered = self.order.around(self._forward)

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._ordered(function, args, kwargs)

    def watch(self) -> Finish | None:
        average = self.averaging.average if self.averaging is not None and self.synced else None
        return all_of(self.order.watch(), self.reductions.watch(synced=self.synced), average)

    def parameters_held(self) -> Iterable[Tensor]:
        return self.parameters

    def release(self) -> None:
        self.reductions.release()
        self.order.release()
        self.gather_outside_inference.release()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self.reductions.take_back()  # the program has zeroed these
        with rehearsed(self.fsdp_units):
            yield

    def _forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.uninitialized.check(self.collective)
        self.additions.refuse()
        if torch.is_inference_mode_enabled():
            self.gather_outside_inference.before_forward(self.module)  # a marked method runs no hooks of the module
        try:
            output = function(*args, **kwargs)
        except RuntimeError as error:
            if self.averaging is not None or "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise RuntimeError(f"{error} {_NOT_GATHERED.format(model=user_class(self.module).__name__)}") from error
        if self.data is not None and self.synced and torch.is_grad_enabled():
            buffers = buffers_of(self.buffered)
            broadcast_from_rank_zero(self.data, buffers if self.averaging is None else map(local_part, buffers))
        return output


_NOT_GATHERED = (
    "Forward of `{model}` computed with a parameter that is in shards: the parameters of a unit are gathered when the "
    "unit is called as a module. Call `block(x)` instead of parts of it, such as `block.attention(x)` or "
    "`block.weight`; or write `FSDPStrategy(auto_wrap_policy=None)`, which gathers the whole model at once. "
    "`fabric.strategy.units(model)` has the names of the units."
)


@final
class MeshAveraging:
    """Gradient averaging of one model on a mesh. Ranks: all create it together, one for each model."""

    def __init__(self, runtime: Runtime, module: nn.Module) -> None:
        assert runtime.mesh is not None
        by_axes = unaveraged(module, runtime.mesh)
        data = tuple(axis for axis in DATA_AXES if degree(runtime.mesh, axis) > 1)
        # Ranks whose models differ (pipeline stages) may need different groups, and all ranks must create each of them.
        wanted = {axes for axes in (*by_axes, data) if axes}
        wanted = wanted.union(*runtime.collective.all_gather_object(wanted))
        groups = {axes: along(runtime.collective, runtime.mesh, axes).for_gradients() for axes in sorted(wanted)}
        self.parameters = list(module.parameters())
        self.unaveraged = [(groups[axes], parameters) for axes, parameters in by_axes.items()]
        self.data = groups[data] if data else None
        """The ranks that hold the same part of the model, and read other data; None: there is no other."""

    def average(self) -> None:
        """Average all gradients that no wrapper reduces. Ranks: all, after the backward."""
        redistribute(self.parameters)
        for collective, parameters in self.unaveraged:
            average(collective, parameters)


@final
class UnreducedGradients:
    """The unfinished gradients of one model. `units`: the modules that `fully_shard` was called on.

    Cost: a byte for each parameter, sent in each backward that gives shards their first gradients.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, units: "Sequence[FSDPModule]") -> None:
        if units:
            require_fully_shard()
        self._runtime, self._module = runtime, module
        self._params = _params(units)
        self._shards: list[nn.Parameter] = [each.sharded_param for each in self._params]
        self._held: list[tuple[Any, GradientPlaceholder, Tensor | None]] = []
        self._zeros = [send for unit in units if (send := getattr(unit, "set_reduce_scatter_unused_params", None))]
        self._unhooked = list(self._params)
        self._hooks: list[RemovableHandle] = []
        self._nodes: list[Node] = []
        """The nodes that accumulate gradients of shards: autograd frees a node without another reference."""
        self._used: list[Tensor] = []
        """The gathered copies that got gradients which are not reduced yet."""
        self._answers: Callable[[], object] = int
        """Waits for the other ranks' answers of the latest backward, if this rank did not need them."""

    def watch(self, *, synced: bool) -> Finish | None:
        """See `GradientSync.watch`. `synced`: whether this backward reduces gradients."""
        if not self._params:
            return None
        if self._held or self._used:  # which also a backward that raised has left
            self.take_back()
        if self._unhooked:
            self._unhooked = [each for each in self._unhooked if not self._hook(each)]
        if not synced:
            return self._hold
        for send in self._zeros:
            send(True, recurse=False)
        return partial(self._finish, list(map(_gradient, self._shards)), len(self._used))

    def release(self) -> None:
        """Remove our hooks and placeholders."""
        self.take_back()
        for hook in self._hooks:
            hook.remove()

    def _hold(self) -> None:
        """See Note [Gradients not reduced yet]."""
        for each, shard in zip(self._params, self._shards, strict=True):
            if shard.grad is not None or _is_unreduced(each):
                self._held.append((each, held := GradientPlaceholder(shard, _NOT_REDUCED), shard.grad))
                shard.grad = held

    def take_back(self) -> None:
        """Remove the placeholders, and the gradients of those that the program has zeroed or replaced."""
        held, self._held = self._held, []
        for each, placeholder, gradient in held:
            shard = each.sharded_param
            is_discarded = shard.grad is not placeholder or placeholder.is_zeroed
            if is_discarded:
                _discard_unreduced(each)
            if shard.grad is placeholder:
                shard.grad = gradient if gradient is None or not is_discarded else gradient.zero_()
        self._used[:] = [each._unsharded_param for each, _, _ in held if _is_unreduced(each)]

    def _hook(self, each: Any) -> bool:
        copy = vars(each).get("_unsharded_param")  # absent before the first forward
        if copy is None or not copy.requires_grad:
            return False
        self._hooks.append(copy.register_post_accumulate_grad_hook(self._used.append))
        if each.sharded_param.requires_grad:  # a gradient from outside of forward, such as a penalty's, is a use too
            self._nodes.append(get_gradient_edge(each.sharded_param).node)
            self._hooks.append(self._nodes[-1].register_prehook(lambda _: self._used.append(copy)))
        return True

    def _finish(self, before: list[Tensor | None], num_kept: int) -> None:
        """After a backward that reduces gradients. `before`: the gradients of the shards before it; `num_kept`: the
        length of `_used` then."""
        for send in self._zeros:
            send(False, recurse=False)
        if not {None}.issuperset(map(_gradient, self._used[num_kept:])):
            raise RuntimeError(_LOST.format(model=user_class(self._module).__name__))
        if num_kept and any(map(_is_unreduced, self._params)):  # the loss is one of other models
            self._hold()
            return
        used = set(map(id, self._used))
        self._used.clear()
        shards = zip(self._params, self._shards, before, strict=True)
        new = [(each, shard) for each, shard, then in shards if then is None and shard.grad is not None]
        if new:
            self._clear_unused(new, used)

    def _clear_unused(self, new: Sequence[tuple[Any, nn.Parameter]], used: set[int]) -> None:
        """See Note [Parameters that some ranks do not use]. `used`: ids of gathered copies.

        Ranks: all, with the same `new` shards, which had no gradient.
        """
        if not self._zeros:
            names = {parameter: name for name, parameter in self._module.named_parameters()}
            sentence = _APART.format(name=user_class(self._module).__name__)
            start_comparing(self._runtime, [names[shard] for _, shard in new], sentence)()
            return
        own = [id(each._unsharded_param) in used for each, _ in new]
        self._answers()  # the last ones arrived long ago
        self._answers = answers = self._runtime.collective.start_all_gather(torch.tensor(own))
        if not all(own):
            self._answers = int
            for (_, shard), is_used in zip(new, answers().any(0).tolist(), strict=True):
                if not is_used:
                    shard.grad = None


@contextmanager
def rehearsed(units: "Sequence[Any]") -> Iterator[None]:
    """Context: forwards and backwards of the units may raise anywhere. At its end the units have shards, and no
    gradients that are not reduced. Raises: ValueError: they have some now, or torch is older than 2.13."""
    inner = {part for unit in units for part in unit.modules() if part is not unit}
    resets = [getattr(unit, "reset_iter_state", None) for unit in units if unit not in inner]
    if None in resets:
        raise ValueError(NOT_ALONE.format(why=f"torch {torch.__version__} cannot reset shards (2.13 can)"))
    params = _params(units)
    if any(map(_is_unreduced, params)):
        raise ValueError(NOT_ALONE.format(why="`fully_shard` has not reduced the gradients of this window yet"))
    try:
        yield
    finally:
        for reset in resets:
            cast(Callable[[], None], reset)()
        for each in params:
            _discard_unreduced(each)


def _unreduced(each: Any) -> list[tuple[Any, str]]:
    """Where a parameter, torch's FSDPParam, has gradients that are not reduced yet: objects and their attributes."""
    copy = vars(each).get("_unsharded_param")  # absent before the first forward
    return [(each, "unsharded_accumulated_grad"), *([] if copy is None else [(copy, "grad")])]


def _params(units: "Sequence[Any]") -> list[Any]:
    """The parameters of units, torch's FSDPParam."""
    states = [vars(unit._get_fsdp_state()) for unit in units]
    # One group of parameters each up to torch 2.12, several from then on.
    groups = [each for state in states for each in state.get("_fsdp_param_groups", [state.get("_fsdp_param_group")])]
    return [each for group in groups if group is not None for each in group.fsdp_params]


def _is_unreduced(each: Any) -> bool:
    """Whether the gathered copy of a parameter, torch's FSDPParam, has a gradient that is not reduced yet."""
    return any(getattr(holder, name) is not None for holder, name in _unreduced(each))


def _discard_unreduced(each: Any) -> None:
    for holder, name in _unreduced(each):
        setattr(holder, name, None)


_LOST = (
    "This backward gave gradients to gathered parameters of `{model}` that are averaged over no ranks, because no "
    "output of their forward is part of this loss. Use parameters within `forward`, or in a method of the model after "
    "`model.mark_forward_method('name')`; and return tensors, not a function or a generator that has them."
)
_APART = (
    "Ranks computed gradients of different parameters of `{name}`, and `fully_shard` adds up gradients by their place "
    "among those that a rank has. The weights are unchanged; `optimizer.zero_grad()` discards the gradients. Use the "
    "same parameters on every rank, or pass `strategy='ddp_find_unused_parameters_true'`."
)
_NOT_REDUCED = (
    "that `fully_shard` has not reduced over the ranks yet: each has accumulated its own in a `fabric.backward` within "
    "`no_backward_sync`. Call `fabric.backward` outside of it; `optimizer.zero_grad()` discards these gradients."
)
