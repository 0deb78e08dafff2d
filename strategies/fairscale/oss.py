"""One model whose parameters are assigned to ranks: gradients and optimizer state are on a parameter's owner.

The implementation of `ddp_sharded`, by FairScale's OSS and ShardedDataParallel, and hooks on the user's optimizer.

Note [Traps of FairScale closed here]
- Reduce buffers lose track of `zero_grad(set_to_none=True)`, torch's default, and train wrongly: none are used.
- A second backward after one forward is not reduced: reduction is prepared before every backward.
- An averaged gradient is averaged again, hence too small, when another backward accumulates into it: it is stored
  elsewhere meanwhile.
- A parameter without a gradient shifts the order in which gradients are matched: that raises.
- `OSS.clip_grad_norm` caches which parameters had gradients at its first call: not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.fairscale.changed_gradients import note, refuse_changed
from fabric.strategies.fairscale.library import LATE, NOT_AVERAGED, SHARDED, UNUSED, look_up, root_logger_untouched
from fabric.strategies.gradients.optimizer_modes import broadcast_after_modes
from fabric.strategies.gradients.reducer import CallModule
from fabric.strategies.gradients.scaling import Factor
from fabric.strategies.gradients.sync import Finish, GradientSync
from fabric.strategies.module.buffers import broadcast_from_rank_zero, buffers_of
from fabric.strategies.module.changes import AddedParameters
from fabric.strategies.tensors.in_shards import InShards
from fabric.strategies.tensors.nests import map_only_tensors
from fabric.strategies.tensors.parameters import name_some, parameters_of
from fabric.strategies.undo import replace_attributes, undo_all


@final
class FairScaleShardedGradientSync(GradientSync):
    """The owner of each parameter of one model, and which gradients are averaged."""

    def __init__(
        self, collective: Collective, module: nn.Module, optimizers: Sequence[Optimizer], *, broadcast_buffers: bool
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
                    optim=lambda groups, optimizer=optimizer: _ShardOf(optimizer, groups),
                )
                for optimizer in optimizers
            }
            self.parallel = ShardedDataParallel(
                CallModule(module),
                list(self.shards.values()),
                broadcast_buffers=False,  # done after forward, so that an evaluation finds equal ones
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
        self.averages = {parameter for parameter, _ in aside}  # those of other owners were discarded since
        for parameter, _ in aside:
            parameter.grad = None
        if not self.synced:
            return partial(self._check_unsynced, aside)
        self.parallel._bucket_flush_callback_set = True  # FairScale need not wait for the messages: the check does
        return partial(self._check_synced, aside)

    @torch.no_grad()
    def _check_synced(self, aside: list[tuple[Tensor, Tensor]]) -> None:
        waiting = self.parallel._grad_to_be_reduced
        reduced = [p for p, waits in zip(self.parallel._trainable_params, waiting, strict=True) if not waits]
        if reduced and any(waiting):  # before waiting for reductions: those of other ranks may be of other parameters
            self.parallel._work_handles.clear()
            missing = [
                n for p, n in self.names.items() if p in self.owner and p.requires_grad and p not in set(reduced)
            ]
            word = type(self.module).__name__
            raise RuntimeError(UNUSED.format(count=len(missing), name=word, some=name_some(missing)))
        self.parallel._consume_work_handles()
        for parameter, average in aside:
            parameter.grad = average if parameter.grad is None else parameter.grad.add_(average)
        for parameter in reduced:
            owner = self.owner[parameter]
            if owner == self.rank:
                self.averages.add(parameter)
            elif not self.is_stepping and parameter.grad is None:
                parameter.grad = InShards(parameter, _ELSEWHERE.format(owner=owner))
        note(self.owner)

    def _hide_others(self) -> None:
        """Remove the placeholders of gradients that other ranks have."""
        for parameter in self.owner:
            if isinstance(parameter.grad, InShards):
                parameter.grad = None

    @torch.no_grad()
    def _check_unsynced(self, aside: list[tuple[Tensor, Tensor]]) -> None:
        for parameter, average in aside:
            if parameter.grad is None:
                parameter.grad = average
            else:  # so that the mean over ranks is the former average plus the mean of the new gradients
                parameter.grad.add_(average, alpha=self.collective.size)
                self.averages.discard(parameter)
        note(self.owner)

    def _refresh_trainable(self) -> None:
        """Reduce the gradients of parameters that require gradients now."""
        trainable = [parameter.requires_grad for parameter in self.owner]
        if trainable != self.trainable:
            self.trainable = trainable
            self.parallel._grad_to_be_reduced = []
            with root_logger_untouched(), torch.enable_grad():
                self.parallel.refresh_trainable()
            self.in_buckets = {parameter: parameter.detach() for parameter in self.owner}

    # Around the optimizer

    def owned(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters of an optimizer that this rank owns. Raises RuntimeError if a gradient was not averaged."""
        mine = []
        for parameter in parameters_of(optimizer):
            if self.owner.get(parameter) == self.rank:
                mine.append(parameter)
            elif parameter.grad is not None and not isinstance(parameter.grad, InShards):
                raise RuntimeError(NOT_AVERAGED.format(optimizer=type(optimizer).__name__))
        return mine

    def _attach(self, optimizer: Optimizer) -> list[Callable[[], None]]:
        self._drop_others(optimizer)
        return [
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
            optimizer.register_state_dict_post_hook(self._gather_state).remove,
            replace_attributes(
                optimizer, load_state_dict=partial(self._load_owned, optimizer, optimizer.load_state_dict)
            ),
            broadcast_after_modes(optimizer, partial(self._after_mode, optimizer)),
        ]

    def _drop_others(self, optimizer: Optimizer) -> None:
        for parameter in [each for each in optimizer.state if self.owner[each] != self.rank]:
            del optimizer.state[parameter]

    def _after_mode(self, optimizer: Optimizer) -> None:
        self._drop_others(optimizer)  # the optimizer has looked for it
        self._return_to_buckets()
        self.shards[optimizer]._broadcast_params()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = parameters_of(optimizer)
        strangers = [parameter for parameter in parameters if parameter not in self.owner]
        if strangers:
            raise RuntimeError(
                f"`{type(optimizer).__name__}` was given {len(strangers)} parameters after `fabric.setup`, which no "
                "rank owns. Add all parameter groups before `fabric.setup(model, optimizer)`."
            )
        self._hide_others()
        self.is_stepping = True
        frozen = [self.names[p] for p in parameters if p.grad is not None and not p.requires_grad]
        if frozen:
            raise RuntimeError(
                f"{len(frozen)} parameters of `{type(self.module).__name__}` ({name_some(frozen)}) have gradients and "
                "are frozen in the step: FairScale would step on the rank that owns them, and not tell the others. "
                "Write `model.requires_grad_(True)` before the step, or `optimizer.zero_grad()`."
            )
        self._refresh_trainable()  # the step is broadcast for those that are trained now
        self._return_to_buckets()
        self.owned(optimizer)
        refuse_changed(optimizer)

    @torch.no_grad()
    def _return_to_buckets(self) -> None:
        """Copy parameters that were given other memory (`parameter.data = other`) back to that of the buckets."""
        moved = {p: kept for p, kept in self.in_buckets.items() if p.data_ptr() != kept.data_ptr()}
        other = [self.names[p] for p, kept in moved.items() if _kind(p) != _kind(kept)]
        if other:
            raise RuntimeError(
                f"{len(other)} parameters of `{type(self.module).__name__}` ({name_some(other)}) were given another "
                "dtype, device or shape after `fabric.setup`, and other ranks would no longer get their updates. Call "
                "`.to(...)`, `.half()` and the like before `setup`."
            )
        for parameter, kept in moved.items():
            parameter.data = kept.copy_(parameter)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_stepping = False
        self.shards[optimizer]._broadcast_params()

    def _gather_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state of all ranks in torch's own format, as copies on the CPU. Ranks: all call it."""
        own = map_only_tensors(lambda tensor: tensor.to("cpu", copy=True), state_dict["state"])
        parts = [
            self.collective.broadcast_object(own if rank == self.rank else None, src=rank)
            for rank in range(self.collective.size)
        ]
        whole = {index: state for part in parts for index, state in part.items()}
        return {**state_dict, "state": dict(sorted(whole.items()))}

    def _load_owned(
        self, optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
    ) -> None:
        """Load the state of the parameters that this rank owns. Not by a hook: an optimizer whose own
        `load_state_dict` calls that of torch would read the whole of it afterwards."""
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        owners = {index: self.owner[p] for index, p in zip(indices, parameters_of(optimizer), strict=False)}
        own = {index: state for index, state in state_dict["state"].items() if owners.get(index) == self.rank}
        load({**state_dict, "state": own})

    def parameters_held(self) -> Iterable[Tensor]:
        return self.owner

    def scale(self, factor: Factor) -> None:
        super().scale(factor)
        note(self.parameters_held())

    def release(self) -> None:
        """Remove the hooks, and give each parameter memory of its own. State stays on its owners."""
        self._hide_others()
        self.detach()
        for handle in self.parallel._grad_hooks:
            handle.remove()
        for parameter in self.owner:
            parameter.data = parameter.data.clone()


_ELSEWHERE = (
    "of a parameter that rank {owner} owns: under `strategy='ddp_sharded'` the averaged gradient is on that rank "
    "alone. For the norm of all gradients, or to clip, call `fabric.clip_gradients(model, optimizer, "
    "max_norm=...)`; to read gradients, pass `strategy='ddp'`."
)


@final
class _ShardOf:
    """The optimizer class that OSS constructs for this rank's shard; the user's optimizer does the steps."""

    def __init__(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        self.optimizer = optimizer
        self.param_groups = groups


@final
class NoOwnersGradientSync(GradientSync):
    """A model without an optimizer: its parameters have no owners, so gradients would not be averaged, and raise."""

    is_replicated = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def watch(self) -> Finish:
        before = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in self.module.parameters()]
        return partial(self._refuse_changed, before)

    def parameters_held(self) -> Iterable[Tensor]:
        return self.module.parameters()

    def scale(self, factor: Factor) -> None:
        pass  # it has no gradients

    def release(self) -> None:
        pass

    def _refuse_changed(self, before: Sequence[tuple[Tensor, Tensor | None, int]]) -> None:
        if any(p.grad is not gradient or _version(p.grad) != version for p, gradient, version in before):
            raise RuntimeError(
                f"This backward computed gradients of `{type(self.module).__name__}`, set up without an "
                "optimizer: under `strategy='ddp_sharded'` they are not averaged. Write "
                "`fabric.setup(model, optimizer)`, or freeze it with `requires_grad_(False)`."
            )


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
