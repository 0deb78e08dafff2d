"""FairScale's wrappers, which gather parameters of modules that they do not contain: for `ddp_fully_sharded`.

Note [Traps of FairScale closed here]
- It does not broadcast initial weights: they are broadcast from rank 0.
- It frees the memory of the parameters, also under views of it: they are copied before.
- It uses gathered parameters after their shards have changed: they are freed then, and gathered again.
- A parameter without a gradient shifts where others are accumulated: that raises.
- `gather_full_optim_state_dict` overwrites state on the CPU, and makes step counts plain numbers: not used.
- A gradient of shape `(1,)` has the shape of its shard, so an averaged one is treated as one that is not: a flag on
  the parameter says which it is.
- A stored gradient is not returned to a parameter that is frozen in that backward: it is.
- A backward that reaches inputs alone raises: it is like one without parameters.
- An averaged gradient is stored elsewhere while others accumulate without synchronisation, and `zero_grad` would miss
  it: it is added to those.
- In a second backward after one forward, or from a second output, parameters are freed: they are gathered again.
- Each forward adds a hook to each parameter's gradient node, and none is removed: that of the forward before is.
- Outputs are copied into plain containers: the user's own object is returned.
- A process group is cached after it was destroyed: the current one is passed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.fairscale.fsdp_cpu import fully_sharded_on_cpu
from fabric.strategies.fairscale.fsdp_state import holds_local
from fabric.strategies.fairscale.library import FULLY_SHARDED, LATE, UNUSED, look_up, root_logger_untouched
from fabric.strategies.gradients.sync import Finish, GradientSync, all_of
from fabric.strategies.module.buffers import broadcast_from_rank_zero, buffers_of
from fabric.strategies.module.changes import AddedParameters
from fabric.strategies.module.forward import ForwardPath, leave_uncompiled
from fabric.strategies.module.outputs import outputs_in
from fabric.strategies.module.transforms import refuse_transforms
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder
from fabric.strategies.sharding.flat_shards import forget, hide, show
from fabric.strategies.tensors.parameters import name_some
from fabric.strategies.torch_internals import current_graph_task_id
from fabric.strategies.undo import replace_attributes, undo_all

UNCOMPILABLE = (
    "`torch.compile` under `strategy='ddp_fully_sharded'`: FairScale gathers parameters in code that the compiler "
    "cannot trace. Leave it out, or pass `strategy='fsdp'`."
)


@final
class _Call:
    """A call of a user's method through FairScale, which would copy its result."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.output: Any = None


@final
class _Unit(nn.Module):
    """The module that FairScale wraps: it holds a module of the user's, and the wrappers of its submodules."""

    def __init__(self, module: nn.Module, within: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.module = module
        self.within = nn.ModuleList(within)

    def forward(self, call: _Call) -> list[Tensor]:
        call.output = call.function(*call.args, **call.kwargs)
        return outputs_in(call.output)


@final
class FairScaleFSDPGradientSync(GradientSync):
    """One sharded model: FairScale's wrappers, and the modules whose parameters they gather."""

    def __init__(
        self,
        runtime: Runtime,
        module: nn.Module,
        parts: Sequence[nn.Module],
        *,
        reshard_after_forward: bool,
        bucket_bytes: int,
        broadcast_buffers: bool,
    ) -> None:
        self.collective, self.module = runtime.collective, module
        self.buffered = list(module.modules()) if broadcast_buffers else []
        self.added_parameters = AddedParameters(module, unfrozen=False)
        self.reduced: set[Tensor] = set()
        for parameter in module.parameters():
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        wrap = partial(
            _wrapper(runtime, self.reduced.add, lambda: hide(self.names), self._show),
            reshard_after_forward=reshard_after_forward,
            bucket_cap_mb=bucket_bytes / 2**20,
        )
        with root_logger_untouched():
            buffers = [(part, list(part.named_buffers(recurse=False))) for part in module.modules()]
            wrapped = {part: wrap(_Unit(part)) for part in reversed(parts)}  # inner before outer
            self.root = wrap(_Unit(module, list(wrapped.values())))
            self.wrappers = (self.root, *wrapped.values())
            for wrapper in self.wrappers:  # the root first: otherwise a submodule that is called first becomes the root
                wrapper._lazy_init()
            for part, named in buffers:
                for name, buffer in named:  # FairScale converts those of float64 and float8, too, to float32
                    if getattr(part, name) is not buffer:
                        setattr(part, name, buffer)
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.num_running = 0
        """Number of running forwards that have gathered parameters."""
        self.has_output = True
        """Whether a tensor was found in the output of the latest forward, at which its backward begins."""
        self.paths = [
            ForwardPath(part, partial(self._through, wrapper), uncompilable=UNCOMPILABLE)
            for part, wrapper in wrapped.items()
        ]
        self.order = ExecutionOrder(runtime, module, parts)
        self._ordered = self.order.around(self._forward)
        inner = [part for part in module.modules() if part is not module and part not in wrapped]
        self.restore = undo_all(
            replace_attributes(part, forward=_Inner(self, part)) for part in inner if part._parameters
        )
        self._show()

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward with gathered parameters, and broadcast buffers from rank 0. Ranks: all call it."""
        return self._ordered(function, args, kwargs)

    def _forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self.added_parameters.refuse(LATE)
        self._drop_stale()
        output = self._through(self.root, function, args, kwargs)
        if torch.is_grad_enabled() and self.synced:
            broadcast_from_rank_zero(self.collective, buffers_of(self.buffered))
        return output

    def _through(
        self, wrapper: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = _Call(function, args, kwargs)
        if not self.num_running:
            refuse_transforms(self.module)
            hide(self.names)
        self.num_running += 1
        try:
            self.has_output = bool(wrapper(call))
        finally:
            self.num_running -= 1
            if not self.num_running and current_graph_task_id() == -1:
                self._show()
        return call.output

    def _show(self) -> None:
        """Parameters are shards from here on: see Note [Classes of shards]."""
        show(self.names, _SHARD, _whole_shape)

    def set_synced(self, synced: bool) -> None:
        """False: backward accumulates unsharded gradients of this rank, without communication."""
        self.synced = synced
        for wrapper in self.wrappers:
            wrapper._require_backward_grad_sync = synced

    def watch(self) -> Finish | None:
        """Returns a post-backward hook that raises if a parameter has no gradient."""
        check = self._check if self.synced else None
        return all_of(self.order.watch(), check)

    def _check(self) -> None:
        took_part = bool(self.reduced)
        missing = [
            name for parameter, name in self.names.items() if parameter.requires_grad and parameter not in self.reduced
        ]
        self.reduced.clear()
        if took_part and missing:
            raise RuntimeError(
                UNUSED.format(count=len(missing), name=type(self.module).__name__, some=name_some(missing))
            )

    def _drop_stale(self) -> None:
        """Free gathered parameters: their shards may have changed since, also through `.data`, which shows nowhere."""
        moved = [name for each, name in self.names.items() if _has_moved(each)]
        if moved:
            raise RuntimeError(_MOVED.format(some=name_some(moved), model=type(self.module).__name__))
        for wrapper in self.wrappers:
            wrapper._free_full_params()
            wrapper._use_fp32_param_shard()

    def explain(self, error: RuntimeError) -> str | None:
        if not self.has_output and "must match the size" in str(error):
            return _NO_OUTPUT.format(name=type(self.module).__name__)
        return None

    def parameters_held(self) -> Iterable[Tensor]:
        return self.names

    def release(self) -> None:
        """Restore the forward of each module. Parameters remain sharded: gathering them is a collective."""
        for path in self.paths:
            path.release()
        self.order.release()
        forget(self.names)
        self.restore()


@final
class _Inner:
    """`forward` of a submodule with parameters. Outside of a forward of the model it raises: they are sharded."""

    def __init__(self, slices: FairScaleFSDPGradientSync, part: nn.Module) -> None:
        functools.update_wrapper(self, part.forward)
        self._slices, self._part, self._forward = slices, part, part.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._slices.num_running or torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        if current_graph_task_id() == -1:  # otherwise activation checkpointing recomputes it in backward
            raise RuntimeError(
                _BY_ITSELF.format(part=type(self._part).__name__, model=type(self._slices.module).__name__)
            )
        return self._forward(*args, **kwargs)


leave_uncompiled(_Inner.__call__)

_BY_ITSELF = (
    "`{part}` of `{model}` was called by itself, and `strategy='ddp_fully_sharded'` gathers its parameters only within "
    "a forward of the model. Call it in a method of the model, and write `model.mark_forward_method('name')` once "
    "after `setup`, with the name of that method; or pass `strategy='fsdp'`, whose submodules can be called by "
    "themselves."
)


_NO_OUTPUT = (
    "Backward reached parameters of `{name}` whose gradients FairScale does not reduce: it begins at the outputs of "
    "forward, and no tensor was found in them. Return tensors, in containers or in attributes of objects, not a "
    "function or a generator that has them."
)
_MOVED = (
    "{some} of `{model}` was given other memory after `fabric.setup` (`parameter.data = other`), and FairScale gathers "
    "the shards that it made then. Copy the values in place: `parameter.data.copy_(other)`."
)


_SHARD = (
    "of a parameter or gradient under `strategy='ddp_fully_sharded'`: outside of forward each rank has a part of each "
    "tensor, and the result would be that of the part. What acts on each element alone is right, such as "
    "`parameter.mul_(0.5)`. For weights, write `model.state_dict()` on all ranks; for the norm of gradients, or to "
    "clip, call `fabric.clip_gradients(model, optimizer, max_norm=...)`, with `float('inf')` for the norm alone; "
    "compute a penalty of weights within `forward`; or pass `strategy='fsdp'`."
)


def _whole_shape(parameter: Any) -> torch.Size:
    shape: torch.Size = parameter._orig_size
    return shape


def _wrapper(
    runtime: Runtime, reduced: Callable[[Tensor], None], hide_all: Callable[[], Any], show_all: Callable[[], None]
) -> Callable[..., Any]:
    """FairScale's class; it also marks reduced gradients, and supports any number of backward passes.

    `hide_all` is called before each backward, and `show_all` after it: see Note [Classes of shards].
    """
    import torch.distributed

    look_up(FULLY_SHARDED)
    if runtime.device.type == "cpu":
        fully_sharded = fully_sharded_on_cpu()
    else:
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        fully_sharded = FullyShardedDataParallel

    class Sharded(fully_sharded):  # type: ignore[misc, valid-type]
        def _register_post_backward_hooks(self) -> None:
            """Before a forward, which adds a hook to each parameter's gradient node: remove that of the forward before.

            A parameter keeps its node, since it is gathered in its own dtype. Hooks of one node run one after the
            other, so that all but the first find nothing to do.
            """
            for param in self.params if torch.is_grad_enabled() else ():
                if param.requires_grad and "_shard_bwd_hook" in vars(param):
                    param._shard_bwd_hook[1].remove()
            super()._register_post_backward_hooks()

        def _post_backward_hook(self, param: Any, *unused: Any) -> None:
            super()._post_backward_hook(param, *unused)
            if not self._require_backward_grad_sync:
                param._is_local = param.grad is not None

        def _post_reduction_hook(self, param: Any, reduced_grad: Tensor) -> None:
            super()._post_reduction_hook(param, reduced_grad)
            param._is_local = False
            reduced(param)

        def _use_full_params(self) -> None:
            """Before backward: gather parameters again that another backward, or another output, has freed."""
            hide_all()
            self._rebuild_full_params()

        def _rebuild_full_params(self, *args: Any, **kwargs: Any) -> Any:
            hide_all()
            return super()._rebuild_full_params(*args, **kwargs)

        def _prep_grads_for_backward(self) -> None:
            """Before backward: store averaged gradients, which are shards, elsewhere."""
            for param in self.params:
                if param.grad is not None and param.grad.shape == param._fp32_shard.shape and not holds_local(param):
                    param._saved_grad_shard = param.grad.data
                    param.grad = None
            super()._prep_grads_for_backward()

        def _wait_for_post_backward(self) -> None:
            """After backward: free parameters that the last of several outputs may have left gathered."""
            reached_none = self.training_state.name == "BACKWARD_PRE"
            if reached_none and any(param.requires_grad for param in self.params):  # `torch.autograd.grad` of an input
                for part in self.modules():
                    if isinstance(part, fully_sharded) and any(param.requires_grad for param in part.params):
                        part.training_state = type(self.training_state).BACKWARD_POST
            if self._require_backward_grad_sync:
                self._free_full_params()
                self._use_fp32_param_shard()
            else:
                for part in self.modules():
                    if isinstance(part, fully_sharded):
                        _take_back(part.params, self.rank, self.world_size)
            super()._wait_for_post_backward()
            for part in self.modules():
                if isinstance(part, fully_sharded):
                    _return_to_frozen(part.params)
            show_all()

    return partial(
        Sharded,
        process_group=torch.distributed.group.WORLD,
        process_group_reduce_scatter=torch.distributed.group.WORLD,
        flatten_parameters=False,  # so that parameters remain the user's objects, each with its group and requires_grad
        compute_dtype=runtime.precision.param_dtype,
        compute_device=runtime.device,
    )


def _has_moved(parameter: Any) -> bool:
    """Whether a parameter has other memory than its shard, or what was gathered."""
    known = (parameter._fp32_shard, vars(parameter).get("_full_param_padded"), vars(parameter).get("_fp16_shard"))
    return parameter.data_ptr() not in [each.data_ptr() for each in known if each is not None]


def _return_to_frozen(parameters: Sequence[Any]) -> None:
    """Return stored averages to parameters that a backward has passed while they were frozen."""
    for parameter in parameters:
        if not parameter.requires_grad and "_saved_grad_shard" in vars(parameter):
            parameter.grad = vars(parameter).pop("_saved_grad_shard")


@torch.no_grad()
def _take_back(parameters: Sequence[Any], rank: int, size: int) -> None:
    """Add the stored averages to the gradients of this rank.

    Each rank adds only its shard, so that the average over the ranks has it once.
    """
    for parameter in parameters:
        average = vars(parameter).pop("_saved_grad_shard", None)
        if average is None:
            continue
        if parameter.grad is None:
            parameter.grad = average
            continue
        own = parameter.grad.view(-1)[rank * average.numel() : (rank + 1) * average.numel()]
        own.add_(average[: own.numel()], alpha=size)
