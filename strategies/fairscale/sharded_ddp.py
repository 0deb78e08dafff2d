"""Data parallelism with the gradients and optimizer state of each parameter on one rank only (ZeRO-2).

FairScale's OSS assigns parameters to ranks, ShardedDataParallel reduces each gradient to its owner during backward (Xu
et al., 2020; Rajbhandari et al., SC 2020). The optimizer is the user's own: after a synchronised backward a rank has
gradients of the parameters that it owns, and placeholders for the others, which are None in a step. So the optimizer
steps, and has state for, only the parameters that its rank owns; a hook on `step` then broadcasts the new values.
`fabric.state_dict(model, optimizer)` gathers the state.

Note [Traps of FairScale closed here]
- Reduce buffers lose track of `zero_grad(set_to_none=True)`, torch's default, and train wrongly: none are used.
- A second backward after one forward is not reduced: reduction is prepared before every backward.
- An averaged gradient is averaged again, hence too small, when another backward accumulates into it: it is stored
  elsewhere meanwhile.
- A parameter without a gradient shifts the order in which gradients are matched: that raises.
- `OSS.clip_grad_norm` caches which parameters had gradients at its first call: not used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.capabilities import Capability, Target, releases
from fabric.strategies.checkpoint.state import PlainState
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero, buffers_of
from fabric.strategies.fairscale.library import (
    LATE,
    NEEDS_ALL,
    NOT_AVERAGED,
    SHARDED,
    UNUSED,
    clip_norm,
    clip_value,
    look_up,
    refuse_optimizers,
    refuse_wrapped,
    root_logger_untouched,
    why_not,
)
from fabric.strategies.gradients.bare_parameters import IN_MODULE
from fabric.strategies.gradients.sync import CallModule, Finish, GradientSync, one_gradient_each
from fabric.strategies.module.model_checks import refuse_shared_memory, refuse_sparse_layers
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.optimizers.owners import OwnersState, refuse_part
from fabric.strategies.prepared import Prepared, place, replica
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import Layout, Runtime
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.gradient_placeholder import GradientPlaceholder
from fabric.strategies.tensors.parameters import name_some, parameters_of
from fabric.strategies.undo import undo_all


@final
@dataclass(frozen=True, kw_only=True)
class FairScaleShardedStrategy(ProcessGroupStrategy):
    """Data parallelism with gradients and optimizer state distributed over the ranks by parameter.

    Args:
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 after each forward that
            computes gradients.
    """

    broadcast_buffers: bool = True

    @property
    def lacks(self) -> Mapping[Capability, str]:
        return {
            "unused": NEEDS_ALL,
            "later_optimizers": _LATER,
            "joint_optimizer": _LATER,
            "bare_parameters": IN_MODULE,
        }

    def look_for_packages(self) -> Mapping[str, str]:
        return releases("fairscale")

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        return Layout(gradients="shards", optimizer_states="shards")

    def why_not(self, target: Target) -> str | None:
        return why_not("ddp_sharded", target)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        _refuse_parameters(module, optimizers)
        place(runtime, module, optimizers, move=move)
        if runtime.world.size == 1:
            return replica(runtime, module, optimizers)
        refuse_shared_memory(module)
        refuse_wrapped("ddp_sharded", module)
        refuse_sparse_layers("ddp_sharded", module)
        refuse_optimizers("ddp_sharded", optimizers, (), flat=False)
        broadcast_from_rank_zero(runtime.collective, [*module.parameters(), *module.buffers()])
        plain = PlainState(runtime.world.size)
        if not optimizers:  # nothing is trained
            return replace(replica(runtime, module, optimizers), state=plain)
        sync = FairScaleShardedGradientSync(runtime.collective, module, optimizers, self.broadcast_buffers)
        return replace(
            replica(runtime, module, optimizers, sync),
            clip_norm=partial(clip_norm, owned=sync.owned, runtime=runtime),
            clip_value=partial(clip_value, owned=sync.owned, runtime=runtime),
            state=OwnersState(runtime.collective, plain, owner_of=lambda optimizer, size: sync.owner),
        )

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        raise ValueError(_LATER)


def _refuse_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for parameters that are not the module's, in two optimizers, or of several dtypes."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    seen: set[Tensor] = set()
    for optimizer in optimizers:
        parameters, word = parameters_of(optimizer), type(optimizer).__name__
        if any(parameter not in names for parameter in parameters):
            raise ValueError(
                f"`{word}` holds parameters that are not of `{type(module).__name__}`. Under "
                "`strategy='ddp_sharded'` an optimizer is set up with the one model whose parameters it holds: make "
                "one for each model, and write `fabric.setup(model, optimizer)` for each."
            )
        twice = [names[parameter] for parameter in parameters if parameter in seen]
        if twice:
            raise ValueError(
                f"{len(twice)} parameters of `{type(module).__name__}` ({name_some(twice)}) are in two optimizers. "
                "Under `strategy='ddp_sharded'` each parameter has one optimizer: leave it in one of the two, or "
                "pass `strategy='ddp'`."
            )
        dtypes = sorted({str(parameter.dtype) for parameter in parameters if parameter.requires_grad})
        if len(dtypes) > 1:
            raise ValueError(
                f"`{word}` holds parameters of {' and '.join(dtypes)}. FairScale packs the parameters of one "
                "optimizer into one buffer, which has one dtype: make an optimizer for each dtype, or pass "
                "`strategy='ddp'`."
            )
        seen.update(parameters)


_LATER = (
    "`fabric.setup_optimizers(...)` under `strategy='ddp_sharded'`: which rank owns a parameter is decided when its "
    "model is set up, from the optimizer that holds it. Make the optimizer first, and write `model, optimizer = "
    "fabric.setup(model, optimizer)`."
)


@final
class FairScaleShardedGradientSync(GradientSync):
    """The owner of each parameter of one model, and which gradients are averaged."""

    def __init__(
        self, collective: Collective, module: nn.Module, optimizers: Sequence[Optimizer], broadcast_buffers: bool
    ) -> None:
        look_up(SHARDED)
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        self.collective, self.rank, self.module = collective, collective.rank, module
        self.buffered = list(module.modules()) if broadcast_buffers else []
        with root_logger_untouched():
            self.shards = {
                # The optimizer of a shard is the user's own. OSS makes its group dictionaries from these.
                optimizer: OSS(
                    [{"params": list(group["params"])} for group in optimizer.param_groups],
                    optim=lambda groups: SimpleNamespace(param_groups=groups),
                )
                for optimizer in optimizers
            }
            self.parallel = ShardedDataParallel(
                CallModule(module),
                list(self.shards.values()),
                broadcast_buffers=False,  # done after forward, so that evaluations have equal buffers
                sync_models_at_startup=False,
                reduce_buffer_size=0,  # see Note [Traps of FairScale closed here]
                auto_refresh_trainable=False,
            )
        self.owner: dict[Tensor, int] = {}
        for shard in self.shards.values():
            self.owner.update(shard._param_to_rank)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self.added_parameters = AddedParameters(module, unfrozen=False)
        self.averages: set[Tensor] = set()
        self.is_stepping = False
        """Whether a step runs, with a closure that may call backward."""
        self.in_buckets: dict[Tensor, Tensor] = {}
        """The memory of each parameter, in the buckets that FairScale broadcasts after a step."""
        self.trainable: list[bool] = []
        self.is_new = False
        """Whether no backward has averaged gradients since the trained parameters changed."""
        self._refresh_trainable()
        self.detach = undo_all(undo for optimizer in optimizers for undo in self._attach(optimizer))

    # Around forward and backward

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward: through ShardedDataParallel, with buffers broadcast from rank 0, if gradients are computed."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self.added_parameters.refuse(LATE)
        self._refresh_trainable()
        output = self.parallel(function, args, kwargs)
        if self.synced:
            broadcast_from_rank_zero(self.collective, buffers_of(self.buffered))
        return output

    def set_synced(self, synced: bool) -> None:
        """False: backward accumulates gradients of this rank, without communication."""
        self.synced = synced
        self.parallel._should_accumulate_grads = not synced

    def watch(self) -> Finish:
        """Prepare the reduction of the next backward; returns a post-backward hook that checks its result."""
        self._hide_others()
        self.parallel._clear_counters()
        aside = [(parameter, parameter.grad) for parameter in self.averages if parameter.grad is not None]
        self.averages = {parameter for parameter, _ in aside}  # without averages that the program has discarded
        for parameter, _ in aside:
            parameter.grad = None
        if not self.synced:
            return partial(self._check_unsynced, aside)
        self.parallel._bucket_flush_callback_set = True  # FairScale need not wait for the messages: the check does
        return partial(self._check_synced, aside, one_gradient_each(self.owner) if self.is_new else None)

    @torch.no_grad()
    def _check_synced(self, aside: list[tuple[Tensor, Tensor]], refuse_twice: Finish | None) -> None:
        waiting = self.parallel._grad_to_be_reduced
        reduced = [p for p, waits in zip(self.parallel._trainable_params, waiting, strict=True) if not waits]
        if reduced and any(waiting):  # before waiting for reductions: other ranks may reduce other parameters
            self.parallel._work_handles.clear()
            missing = [
                n for p, n in self.names.items() if p in self.owner and p.requires_grad and p not in set(reduced)
            ]
            word = type(self.module).__name__
            raise RuntimeError(UNUSED.format(count=len(missing), name=word, some=name_some(missing)))
        self.parallel._consume_work_handles()
        if refuse_twice is not None:
            refuse_twice()
            self.is_new = not reduced
        for parameter, average in aside:
            parameter.grad = average if parameter.grad is None else parameter.grad.add_(average)
        for parameter in reduced:
            owner = self.owner[parameter]
            if owner == self.rank:
                self.averages.add(parameter)
            elif not self.is_stepping and parameter.grad is None:
                parameter.grad = GradientPlaceholder(parameter, _ELSEWHERE.format(owner=owner))

    @torch.no_grad()
    def _check_unsynced(self, aside: list[tuple[Tensor, Tensor]]) -> None:
        for parameter, average in aside:
            if parameter.grad is None:
                parameter.grad = average
            else:  # so that the mean over ranks is the former average plus the mean of the new gradients
                parameter.grad.add_(average, alpha=self.collective.size)
                self.averages.discard(parameter)

    def _refresh_trainable(self) -> None:
        """Reduce the gradients of parameters that require gradients now."""
        trainable = [parameter.requires_grad for parameter in self.owner]
        if trainable != self.trainable:
            self.trainable, self.is_new = trainable, True
            self.parallel._grad_to_be_reduced = []
            with root_logger_untouched(), torch.enable_grad():
                self.parallel.refresh_trainable()
            self.in_buckets = {parameter: parameter.detach() for parameter in self.owner}

    # Around the optimizer

    def owned(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters of an optimizer that this rank owns. Raises RuntimeError if a gradient was not averaged."""
        mine = []
        for parameter in parameters_of(optimizer):
            owner = self.owner.get(parameter)
            if owner == self.rank:
                mine.append(parameter)
            elif owner is None:
                raise RuntimeError(_WITHOUT_OWNER.format(optimizer=type(optimizer).__name__))
            elif parameter.grad is not None and not isinstance(parameter.grad, GradientPlaceholder):
                raise RuntimeError(NOT_AVERAGED.format(optimizer=type(optimizer).__name__))
        return mine

    def _hide_others(self) -> None:
        """Remove the placeholders of gradients that other ranks have."""
        for parameter in self.owner:
            if isinstance(parameter.grad, GradientPlaceholder):
                parameter.grad = None

    def _attach(self, optimizer: Optimizer) -> list[Callable[[], None]]:
        self._drop_others(optimizer)
        return [
            hook_steps(optimizer, self._before_step, self._after_step),
            optimizer.register_state_dict_pre_hook(refuse_part).remove,
        ]

    def _drop_others(self, optimizer: Optimizer) -> None:
        """Drop the state of parameters that other ranks own: `load_state_dict` loads it on every rank."""
        for parameter in list(optimizer.state):
            if self.owner.get(parameter, self.rank) != self.rank:
                del optimizer.state[parameter]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.owned(optimizer)
        self._drop_others(optimizer)
        self._hide_others()
        self.is_stepping = True
        self._refresh_trainable()  # the new values of parameters that are trained now are broadcast

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Broadcast new values from the owners, after copying parameters that were given other memory
        (`parameter.data = other`) back to that of the buckets."""
        self.is_stepping = False
        for parameter, kept in self.in_buckets.items():
            if parameter.data_ptr() != kept.data_ptr():
                parameter.data = kept.copy_(parameter)
        self.shards[optimizer]._broadcast_params()

    def parameters_held(self) -> Iterable[Tensor]:
        return self.owner

    def release(self) -> None:
        """Remove the hooks, and give each parameter memory of its own. State stays on its owners."""
        self._hide_others()
        self.detach()
        for handle in self.parallel._grad_hooks:
            handle.remove()
        for parameter in self.owner:
            parameter.data = parameter.data.clone()


_WITHOUT_OWNER = (
    "`{optimizer}` was given parameters after `fabric.setup`, which no rank owns. Add all parameter groups before "
    "`fabric.setup(model, optimizer)`."
)
_ELSEWHERE = (
    "of a parameter that rank {owner} owns: under `strategy='ddp_sharded'` the averaged gradient is on that rank "
    "alone. For the norm of all gradients, or to clip, call `fabric.clip_gradients(model, optimizer, "
    "max_norm=...)`; to read gradients, pass `strategy='ddp'`."
)
