"""FairScale's wrappers, which gather parameters of modules that they do not contain: for `ddp_fully_sharded`.

Note [Traps of FairScale closed here]
- It does not broadcast initial weights: they are broadcast from rank 0.
- It frees the memory of the parameters, even if views share it: parameters are copied before.
- It converts buffers to the dtype of the parameters, before each forward: buffers keep their dtype.
- It uses gathered parameters after their shards have changed: such parameters are freed and gathered again.
- A parameter without a gradient shifts where others are accumulated: that raises.
- `gather_full_optim_state_dict` overwrites state on the CPU, and makes step counts plain numbers: not used.
- A gradient of shape `(1,)` has the shape of its shard, so an averaged gradient is taken for one that is not averaged:
  the class of a gradient tells them apart (`fsdp_shards.py`).
- It drops the stored gradient of a parameter that is frozen in a backward: the gradient is put back.
- A backward that reaches inputs alone raises: such a backward is permitted.
- It stores an averaged gradient elsewhere while gradients accumulate without synchronisation, where `zero_grad` misses
  it: the average is added to the accumulated gradient.
- In a second backward after one forward, or from a second output, parameters are freed: they are gathered again.
- Each forward adds a hook to each parameter's gradient node, and removes none: the previous forward's hook is removed.
- Outputs are copied into plain containers: the user's own object is returned.
- A process group is cached after it was destroyed: the current one is passed.

# Note [FairScale on the CPU]
FairScale's released class does not support the CPU. Two of its modules are loaded a second time, with a `torch` whose
`cuda` is `torch.cpu`: `torch.cpu` has the same stream functions, which do nothing. FairScale's own modules, torch and
the environment are not changed. All-gather and reduce-scatter take lists there: gloo refuses the flat forms that
FairScale prefers.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, NoReturn, final
from weakref import proxy

import torch
import torch.distributed
from torch import Tensor, nn

from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero, buffers_of
from fabric.strategies.fairscale.fsdp_shards import ModuleHook, conceal, holds_local, plain_of, reveal
from fabric.strategies.fairscale.library import FULLY_SHARDED, LATE, UNUSED, look_up, root_logger_untouched
from fabric.strategies.gradients.sync import NOT_ALONE, Finish, GradientSync, all_of
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.module.output_tensors import tensors_requiring_grad
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder
from fabric.strategies.tensors.parameters import name_some
from fabric.strategies.torch_internals import current_graph_task_id

UNCOMPILABLE = (
    "`torch.compile` under `strategy='ddp_fully_sharded'`: FairScale gathers parameters in code that the compiler "
    "cannot trace. Leave it out, or pass `strategy='fsdp'`."
)


@final
class _Unit(nn.Module):
    """The module that FairScale wraps: it holds a module of the user, and the wrappers of that module's submodules."""

    def __init__(self, module: nn.Module, within: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.module = module
        self.within = nn.ModuleList(within)

    def forward(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        return run()


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
        options = {"reshard_after_forward": reshard_after_forward, "bucket_cap_mb": bucket_bytes / 2**20}
        wrap = partial(_wrapper(runtime), **options)
        with root_logger_untouched():
            wrapped = {part: wrap(_Unit(part)) for part in reversed(parts)}  # inner before outer
            self.root = wrap(_Unit(module, list(wrapped.values())))
            self.wrappers = (self.root, *wrapped.values())
            self.units = [wrapper.module for wrapper in self.wrappers]
            for wrapper in self.wrappers:  # the root first: otherwise a submodule that is called first becomes the root
                wrapper._lazy_init()
                wrapper.reduced = self.reduced
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.num_running = 0
        """Number of running forwards that have gathered parameters."""
        self.paths = [
            ForwardPath(part, partial(self._through, wrapper), uncompilable=UNCOMPILABLE)
            for part, wrapper in wrapped.items()
        ]
        self.order = ExecutionOrder(runtime, module, parts)
        self._ordered = self.order.around(self._forward)
        self.handles = [
            part.register_forward_pre_hook(ModuleHook(self._refuse_alone))
            for part in module.modules()
            if part is not module and part not in wrapped and part._parameters
        ]

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
        output: Any = None

        def run() -> list[Tensor]:
            """Run the user's function. Return the tensors in its output: FairScale would copy the output itself."""
            nonlocal output
            output = function(*args, **kwargs)
            return tensors_requiring_grad(output)

        self.num_running += 1
        try:
            wrapper(run)
        except BaseException:
            # FairScale leaves parameters gathered. In backward, activation checkpointing ends a forward by raising.
            if self.num_running == 1 and current_graph_task_id() == -1:
                self._drop_stale()
            raise
        finally:
            self.num_running -= 1
        return output

    def _refuse_alone(self, part: nn.Module, args: Any) -> None:
        """A hook of the submodules with parameters: raise RuntimeError if one is called while it is sharded."""
        if self.num_running or torch.compiler.is_compiling():
            return
        if current_graph_task_id() == -1:  # otherwise activation checkpointing recomputes it in backward
            raise RuntimeError(_BY_ITSELF.format(part=type(part).__name__, model=type(self.module).__name__))

    def set_synced(self, synced: bool) -> None:
        """False: backward accumulates unsharded gradients of this rank, without communication."""
        self.synced = synced
        for wrapper in self.wrappers:
            wrapper._require_backward_grad_sync = synced

    def rehearsal(self) -> NoReturn:
        raise ValueError(NOT_ALONE.format(why="FairScale cannot go on after a backward that was cut short"))

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

    @torch.no_grad()
    def _drop_stale(self) -> None:
        """Free gathered parameters: their shards may have changed since, also through `.data`, which leaves no trace.

        A parameter whose memory was replaced (`parameter.data = other`) is copied into its shard.
        """
        parameters: Iterable[Any] = self.names
        for parameter in parameters:
            shard = parameter._fp32_shard
            if parameter.data_ptr() not in (shard.data_ptr(), parameter._full_param_padded.data_ptr()):
                shard.copy_(parameter)
        for wrapper in self.wrappers:
            wrapper._free_full_params()
            wrapper._use_fp32_param_shard()

    def parameters_held(self) -> Iterable[Tensor]:
        return self.names

    def release(self) -> None:
        """Restore the forward of each module. Parameters remain sharded: gathering them is a collective."""
        for path in self.paths:
            path.release()
        self.order.release()
        for handle in self.handles:
            handle.remove()
        reveal(self.names)


_BY_ITSELF = (
    "`{part}` of `{model}` was called by itself, and `strategy='ddp_fully_sharded'` gathers its parameters only within "
    "a forward of the model. Call it in a method of the model, and write `model.mark_forward_method('name')` once "
    "after `setup`, with the name of that method; or pass `strategy='fsdp'`, whose submodules can be called by "
    "themselves."
)


def _wrapper(runtime: Runtime) -> Callable[..., Any]:
    """A subclass of FairScale's class that records reduced gradients, and supports any number of backward passes."""
    look_up(FULLY_SHARDED)
    if runtime.device.type == "cpu":
        fully_sharded = fully_sharded_on_cpu()
    else:
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        fully_sharded = FullyShardedDataParallel

    class Sharded(fully_sharded):  # type: ignore[misc, valid-type]
        reduced: set[Tensor]
        """The parameters whose gradients the present backward has reduced."""

        def _cast_buffers(self, *args: Any, **kwargs: Any) -> None:
            """Leave buffers as they are."""

        def _register_post_backward_hooks(self) -> None:
            """Before a forward: replace the hook on each parameter's gradient node, which FairScale only adds.

            A parameter keeps its node, since it is gathered in its own dtype. Hooks of one node run one after the
            other, and only the first has work to do.
            """
            if not torch.is_grad_enabled():
                return
            for _, handle, _ in vars(self).get("_nodes", ()):
                handle.remove()
            super()._register_post_backward_hooks()
            # Kept here: a parameter that refers to its own node would never be freed.
            self._nodes = []
            for param in self.params:  # no comprehension, which is a call
                if param.requires_grad:
                    node, handle = vars(param).pop("_shard_bwd_hook")
                    hooks = handle.hooks_dict_ref()
                    self._nodes.append((node, handle, hooks[handle.id]))
                    hooks[handle.id] = proxy(hooks[handle.id])  # `hold_weakly` without a call

        def _post_reduction_hook(self, param: Any, reduced_grad: Tensor) -> None:
            super()._post_reduction_hook(param, reduced_grad)
            self.reduced.add(param)

        def _use_full_params(self) -> None:
            """Before backward: gather parameters again that another backward, or another output, has freed."""
            self._rebuild_full_params()

        def _prep_grads_for_backward(self) -> None:
            """Before backward: store averaged gradients, which are shards, elsewhere."""
            for param in self.params:
                if param.grad is not None and not holds_local(param):
                    param._saved_grad_shard, param.grad = plain_of(param.grad), None

        def _wait_for_post_backward(self) -> None:
            """After backward, in the root: free parameters that the last of several outputs may have left gathered."""
            units = [part for part in self.modules() if isinstance(part, fully_sharded)]
            # No parameter was reached: `torch.autograd.grad` of an input.
            if self.training_state.name == "BACKWARD_PRE":
                for unit in units:
                    if any(param.requires_grad for param in unit.params):
                        unit.training_state = type(self.training_state).BACKWARD_POST
            if self._require_backward_grad_sync:
                self._free_full_params()
                self._use_fp32_param_shard()
            else:
                for unit in units:
                    _take_back(unit.params, self.rank, self.world_size)
            super()._wait_for_post_backward()
            for unit in units:
                for param in unit.params:
                    if not param.requires_grad and "_saved_grad_shard" in vars(param):  # frozen in this backward
                        param.grad = vars(param).pop("_saved_grad_shard")
                        conceal([param])
            if self._require_backward_grad_sync:
                conceal(self.reduced)

    return partial(
        Sharded,
        process_group=torch.distributed.group.WORLD,
        process_group_reduce_scatter=torch.distributed.group.WORLD,
        flatten_parameters=False,  # so that parameters remain the user's objects, each with its group and requires_grad
        compute_dtype=runtime.precision.param_dtype,
        compute_device=runtime.device,
    )


@torch.no_grad()
def _take_back(parameters: Sequence[Any], rank: int, size: int) -> None:
    """Add the stored averages to the gradients of this rank.

    Each rank adds only its shard, so the average over the ranks contains each stored average once.
    """
    for parameter in parameters:
        average = vars(parameter).pop("_saved_grad_shard", None)
        if average is not None and parameter.grad is None:
            parameter.grad = average
            conceal([parameter])
        elif average is not None:
            own = parameter.grad.view(-1)[rank * average.numel() : (rank + 1) * average.numel()]
            own.add_(average[: own.numel()], alpha=size)


@cache
def fully_sharded_on_cpu() -> type[Any]:
    """FairScale's class for CPU tensors and gloo. Returns the same class at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        # FairScale uses TypedStorage in every step; torch warns only of the first use.
        torch.empty(0).storage()  # type: ignore[no-untyped-call]
    bucketer = _copy_of("fairscale.internal.reduce_scatter_bucketer")
    original = _copy_of("fairscale.nn.data_parallel.fully_sharded_data_parallel")
    original.ReduceScatterBucketer = bucketer.ReduceScatterBucketer
    original.torch = ModuleType("torch")
    vars(original.torch).update({**vars(torch), "cuda": torch.cpu})
    post, free, chunks = original.TrainingState.BACKWARD_POST, original.free_storage_, original.chunk_and_pad

    class FullyShardedOnCPU(original.FullyShardedDataParallel):  # type: ignore[misc, name-defined]
        """Without `Tensor.record_stream`, which has no CPU kernel: on the CPU no other stream runs."""

        def _free_full_params(self, params: list[Any] | None = None) -> None:
            self.has_full_params = False
            for param in self.params if params is None else params:
                free(param._full_param_padded)

        @torch.no_grad()
        def _post_backward_hook(self, param: Tensor, *unused: Any) -> None:
            """Called when a gradient is complete: frees the unsharded parameter, and reduce-scatters the gradient."""
            self.training_state = post
            gradient = param.grad
            if gradient is None:
                return
            if self._require_backward_grad_sync or self.reshard_after_forward:
                self._free_full_params([param])
            self._use_fp32_param_shard([param])
            if self._require_backward_grad_sync:
                param.grad = None
                gradient.div_(self.gradient_predivide_factor)
                with torch.cpu.stream(self._streams["post_backward"]):
                    self._reducer.reduce_scatter_async(
                        chunks(gradient, self.world_size),
                        group=self.process_group_reduce_scatter,
                        callback_fn=partial(self._post_reduction_hook, param),
                    )

    return FullyShardedOnCPU


def _copy_of(name: str) -> Any:
    """Load a module of FairScale again, without adding it to `sys.modules`."""
    spec: Any = find_spec(name)
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.enable_nccl_base_collectives = False
    return module
