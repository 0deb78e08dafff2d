"""One model under ZeRO: backward, clipping, and the steps of the user's own optimizer by DeepSpeed's engine.

The engine is never told that a backward is the last of an accumulation window, so gradients accumulate over any number
of them, as in plain PyTorch; the reduction is completed once, when gradients are first needed: in `clip_gradients` or
`step()`. Accesses DeepSpeed's gradient shards directly (0.19), because its own clipping supports only one norm, and
runs only in `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.strategies.deepspeed.gradients import Placeholders
from fabric.strategies.deepspeed.groups import IN_SHARDS, LATE_GROUP, Groups
from fabric.strategies.deepspeed.library import STAGE_3, look_up
from fabric.strategies.deepspeed.released import Released
from fabric.strategies.deepspeed.state import as_changed
from fabric.strategies.gradients.scaling import multiply
from fabric.strategies.module.buffers import broadcast_from_rank_zero, buffers_of
from fabric.strategies.module.changes import AddedParameters
from fabric.strategies.module.copies import Hook
from fabric.strategies.module.outputs import outputs_in
from fabric.strategies.precision.loss_scaler import all_finite
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder, start_comparing
from fabric.strategies.tensors.packing import Spec
from fabric.strategies.tensors.parameters import name_some
from fabric.strategies.torch_internals import disable_dynamo
from fabric.strategies.undo import replace_attributes, undo_all


@final
class Engine:
    """A DeepSpeed engine with an optimizer: the functions of a `Prepared`."""

    def __init__(
        self,
        runtime: Runtime,
        module: nn.Module,
        engine: Any,
        stage: int,
        *,
        broadcast_buffers: bool,
    ) -> None:
        if stage == 3:
            look_up(STAGE_3)
        self.runtime = runtime
        self.module = module
        self.engine = engine
        self.zero = engine.optimizer
        self.stage = stage
        self.trained = [parameter for group in self._groups() for parameter in group]
        self.buffered = list(module.modules()) if broadcast_buffers and runtime.world.size > 1 else []
        broadcast_from_rank_zero(runtime.collective, buffers_of(self.buffered))
        self.order = ExecutionOrder(runtime, module, gathered_parts(module) if stage == 3 else ())
        self._has_gradients = self._is_reduced = self._is_called = self._is_started = False
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self.placeholders = Placeholders(names)
        self.added_parameters = AddedParameters(module, unfrozen=True, frozen=stage == 3)
        self._reached: set[Tensor] = set()
        self._accumulated: set[Tensor] = set()  # in this accumulation window
        self._stepped: set[Tensor] = set()
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(Hook(self._enter), prepend=True),
            module.register_forward_hook(Hook(self._leave)),  # after DeepSpeed's, which releases weights
            *(each.register_post_accumulate_grad_hook(self._reached_by_backward) for each in self.trained),  # type: ignore[no-untyped-call]
        ]
        self._places: dict[Tensor, tuple[int, int]] = {}
        self._unreduced: dict[Tensor, Tensor] = {}  # at stage 1, between backwards: this rank's gradients
        self._partitions: list[list[Tensor]] = []  # at stage 3, after the first window
        self.engine.set_gradient_accumulation_boundary(False)
        if stage == 3:
            self._step_from_accumulated()
        elif self.zero.cpu_offload:
            self._accumulate_in_place(self.zero._finalize_cpu_offload_gradient_accumulation)
        if stage == 2 and runtime.world.size > 1:
            self._compare_before(self.zero.reduce_ipg_grads)
        if stage == 2:
            for group, parameters in enumerate(self.zero.params_in_partition):
                self._places.update({parameter: (group, place) for place, parameter in enumerate(parameters)})
        self.discard()
        self.released = Released(module.named_parameters()) if stage == 3 else None
        self.remember_weights()

    # Forward and backward

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the module, so that the engine handles the backward of its outputs."""
        is_called, self._is_called = self._is_called, False
        if not is_called and self.stage == 3:
            raise RuntimeError(f"`{getattr(function, '__name__', '?')}` was called directly, but {NOT_GATHERED}")
        if not is_called and torch.is_grad_enabled():
            self.added_parameters.refuse(NEVER_TRAINED)
        output = function(*args, **kwargs)
        if torch.is_grad_enabled():
            broadcast_from_rank_zero(self.runtime.collective, buffers_of(self.buffered))
            start = self._starts_backward()
            for tensor in outputs_in(output):
                tensor.register_hook(start)  # type: ignore[no-untyped-call]
        return output

    def watch(self) -> Callable[[], None]:
        """Called before a backward. Returns a post-backward hook."""
        self._discard_zeroed()
        if self.released is not None:
            self.released.refuse_other_data()
        self._is_started = False
        self.zero.clear_backward_seen_flag()
        if self.stage == 3 and self.zero.micro_step_id and len(self._accumulated) < len(self.trained):
            # Only the first backward of a window overwrites, and through a frozen model it reached no parameter.
            for parameter in self.trained:
                if parameter not in self._accumulated:
                    self._zero(parameter)
        check = self.order.watch()

        def finish() -> None:
            if check is not None:
                check()
            self._set_placeholders()

        return finish

    def _reached_by_backward(self, parameter: Tensor) -> None:
        if not self.runtime.backward.is_running:
            raise RuntimeError(_PLAIN_BACKWARD.format(name=type(self.module).__name__))
        if not self._is_started:
            raise RuntimeError(
                _PAST_FORWARD.format(name=self.placeholders.names[parameter], model=type(self.module).__name__)
            )
        self._reached.add(parameter)
        self._accumulated.add(parameter)

    @disable_dynamo
    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():  # at stage 3 before the hooks of DeepSpeed, which would not know an added parameter
            self.added_parameters.refuse(NEVER_TRAINED)
        if self.released is not None:
            self.released.refuse_other_data()
        self._is_called = True

    @disable_dynamo
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.released is not None:
            self.released.put()

    def _starts_backward(self) -> Callable[[Tensor], None]:
        """A hook for the outputs of one forward; it starts the engine's backward when the first of them is reached."""
        was_run = False

        def start(_: Tensor) -> None:
            nonlocal was_run
            if self._is_started:
                return
            if was_run and self.stage == 3:
                raise RuntimeError(_RUN_TWICE.format(name=type(self.module).__name__))
            self._is_started = was_run = True
            self._start_backward()

        return start

    def _start_backward(self) -> None:
        if self._is_reduced:
            raise RuntimeError(
                f"A backward of `{type(self.module).__name__}` between `clip_gradients`, or a synchronised "
                "`backward(weight=...)`, and `optimizer.step()`: under DeepSpeed, both end the accumulation window. "
                "Clip after the last backward, and run those before it within `fabric.accumulate` or "
                "`no_backward_sync`."
            )
        self._has_gradients = True
        self.engine._backward_prologue()

    # Gradients

    def clip_norm(self, _: Optimizer, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients so that their norm over all shards is at most `max_norm`. Returns the former norm."""
        order = float(norm_type)
        with self._gradients() as shards:
            total = self._norm(shards, order)
            if error_if_nonfinite and not self.zero.needs_scaler() and not total.isfinite():
                raise RuntimeError(
                    f"The gradients of `{type(self.module).__name__}` have a norm (order {order:g}) of {total.item()}, "
                    "so they cannot be clipped. Pass `error_if_nonfinite=False` to continue: DeepSpeed then skips the "
                    "step."
                )
            factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
            for shard in shards:
                shard.mul_(factor.to(shard.device))
        return total

    def _norm(self, shards: Sequence[Tensor], order: float) -> Tensor:
        """The norm of the gradients over all shards, without the loss scale."""
        norms = [torch.linalg.vector_norm(shard, order, dtype=torch.float32) for shard in shards if shard.numel()]
        local = torch.stack(norms) if norms else torch.zeros(1, device=self.runtime.device)
        all_reduce = self.runtime.collective.all_reduce
        if order == float("inf"):
            total = all_reduce(local.max(), "max")
        else:
            total = all_reduce((local**order).sum(), "sum") ** (1.0 / order)
        return total / float(self.zero.loss_scale)

    def clip_value(self, _: Optimizer, clip_val: float) -> None:
        """Clamp each gradient to `[-clip_val, clip_val]`."""
        bound = clip_val * float(self.zero.loss_scale)
        with self._gradients() as shards:
            for shard in shards:
                shard.clamp_(-bound, bound)

    def is_finite(self, _: Optimizer) -> bool:
        """Whether all gradients are finite on all ranks. Ends the accumulation window, as clipping does."""
        with self._gradients() as shards:
            found = all_finite(shards)
        return self.runtime.collective.reduce_boolean_decision(found)

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply each gradient. Ends the accumulation window, as clipping does."""
        with self._gradients() as shards:
            multiply(shards, factor)

    @contextmanager
    def _gradients(self) -> Iterator[list[Tensor]]:
        """Context: this rank's shards of the averaged gradients, without those that the user has zeroed."""
        self._discard_zeroed()
        yield self._shards()
        self._set_placeholders()

    def discard(self) -> None:
        """Discard all gradients, and zero all buffers."""
        if self.stage == 3 or self.zero.cpu_offload:
            for buffer in self._buffers():
                buffer.zero_()
        self._end_window()

    def _end_window(self) -> None:
        """Discard gradients: the next backward overwrites them, and `_refuse_missing` raises for the others."""
        self.placeholders.drop()
        self.zero.zero_grad(set_to_none=True)
        self.engine.set_gradient_accumulation_boundary(False)
        if self.stage == 3:
            self.zero._offload_boundary_param_ids = set()
        else:
            self.zero.micro_step_id = -1
            self.zero.averaged_gradients = dict.fromkeys(self.zero.averaged_gradients)
            self.zero.all_grad_tensors = {}
            if self.zero.cpu_offload:
                self.zero._offload_accumulated_param_ids = set()
                self.zero.reset_cpu_buffers()
        self._has_gradients = self._is_reduced = False
        self._accumulated = set()
        self._unreduced = {}

    def _discard_zeroed(self) -> None:
        """Discard the gradients that the user has zeroed since the last backward, not through the optimizer."""
        if not self._has_gradients:
            return
        gone, zeroed = self.placeholders.take()
        unreduced, self._unreduced = self._unreduced, {}
        for parameter in gone:
            unreduced.pop(parameter, None)
        for parameter, gradient in unreduced.items():
            parameter.grad = gradient
        if not gone and not zeroed:
            return
        if len(gone) == len(self._reached):
            self.discard()
            self._reached = set()
            return
        if self._is_reduced:
            raise RuntimeError(_CLIPPED.format(name=type(self.module).__name__, count=len(gone) + len(zeroed)))
        self._reached.difference_update(gone)
        self._accumulated.difference_update(gone)
        for parameter in (*gone, *zeroed):
            if not self._are_in_parameters():
                self._zero(parameter)
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def take_changed_weights(self) -> None:
        """Write what the program has changed in the weights since the last step into the shards that DeepSpeed trains.

        Raises: RuntimeError: they were changed at stage 3; at the other stages `parameter.data` has another shape,
        dtype or device.
        """
        if self.released is not None:
            self.released.refuse_changes()
            return
        addresses = self._addresses()
        moved = [n for n, (now, then) in enumerate(zip(addresses, self._addresses_then, strict=True)) if now != then]
        if moved:
            self._move_back(moved)
        zero = self.zero
        partitions = zip(zero.parallel_partitioned_bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        for (parts, trained), group in zip(partitions, zero.real_dp_process_group, strict=True):
            trained.data.copy_(as_changed(trained.data, parts[torch.distributed.get_rank(group)]))

    def _move_back(self, moved: Iterable[int]) -> None:
        """Copy weights that were set by `parameter.data = other` to where DeepSpeed looks for them."""
        given = {number: self.trained[number].data for number in moved}
        for group in range(len(self.zero.bit16_groups)):
            self.zero._update_model_bit16_weights(group)
        for number, other in given.items():
            weight = self.trained[number].data
            if (other.shape, other.dtype, other.device) != (weight.shape, weight.dtype, weight.device):
                raise RuntimeError(
                    _OTHER_WEIGHT.format(name=self._name(number), now=Spec.of(other), then=Spec.of(weight))
                )
            weight.copy_(other)

    def _name(self, number: int) -> str:
        return self.placeholders.names[self.trained[number]]

    def trained_shards(self) -> list[Tensor]:
        """This rank's shards of the weights that DeepSpeed trains, after `take_changed_weights`."""
        zero, is_changed = self.zero, self.released is None and self._addresses() != self._addresses_then
        self.take_changed_weights()
        flats = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        shards = [flat.detach() for flat in flats]
        if is_changed:
            torch.autograd.graph.increment_version(shards)
            self.remember_weights()
        return shards

    def gather_trained(self) -> None:
        """Make the model's weights from the shards that DeepSpeed trains, as after a step. Ranks: all."""
        if self.stage == 3:
            self.zero.checkpoint_event_prologue()
            for group in range(len(self.zero.fp16_groups)):
                self.zero._reassign_or_swap_out_partitioned_parameters(group)
            self.zero.checkpoint_event_epilogue()
        else:
            self.zero.update_lp_params()
        self.remember_weights()

    def remember_weights(self) -> None:
        """Record the current weights as those that DeepSpeed trains."""
        if self.released is not None:
            self.released.put()
        else:
            self._addresses_then = self._addresses()

    def _addresses(self) -> list[int]:
        """What `parameter.data = other` changes."""
        return [parameter.data_ptr() for parameter in self.trained]

    def _are_in_parameters(self) -> bool:
        """Whether gradients accumulate in `parameter.grad` during backward, as in plain PyTorch."""
        return self.stage == 1 and not self._is_reduced

    def _set_placeholders(self) -> None:
        """Set placeholders for gradients that DeepSpeed moved out of the parameters, so that `zero_grad` finds them.

        At stage 1 they are moved out here until the next backward or step: they are those of this rank alone.
        """
        if self.released is not None:
            self.released.put()  # before gradients, which have the shapes of their parameters
        if not self._has_gradients:
            return
        if self._are_in_parameters():
            self._unreduced = {each: each.grad for each in self._reached if each.grad is not None}
        self.placeholders.set(self._reached)

    def _zero(self, parameter: Tensor) -> None:
        """Zero this rank's part of an accumulated gradient."""
        zero = self.zero
        if self.stage == 3:
            zero._get_fp32_grad_state_partition(parameter, True)[0].zero_()
            return
        index = zero.get_param_id(parameter)
        if zero.cpu_offload:
            if index in zero.accumulated_grads_in_cpu:  # this rank has a part of it
                zero.accumulated_grads_in_cpu[index].zero_()
        elif parameter in self._places:
            group, place = self._places[parameter]
            if zero._use_compact_grad_partition_buffer(group):
                rank = torch.distributed.get_rank(zero.real_dp_process_group[group])
                start = int(zero.grad_partition_insertion_offset[group][rank][index])
                offset = int(zero.grad_start_offset[group][rank][index])
                length = min(parameter.numel() - offset, int(zero.partition_size[group]) - start)
                zero._get_compact_grad_partition_slice(group, rank, index, length).zero_()
            else:
                zero.all_grad_tensors[group][place].zero_()

    def _shards(self) -> list[Tensor]:
        """This rank's shards of the averaged gradients, to be changed in place."""
        if not self._has_gradients:
            return []
        self._reduce()
        if self.stage == 3 or self.zero.cpu_offload:
            return self._buffers()
        return [shard for group in self.zero.averaged_gradients.values() for shard in group]

    def _buffers(self) -> list[Tensor]:
        if self.stage == 3:
            return [self.zero._get_fp32_grad_state_partition(parameter, True)[0] for parameter in self.trained]
        return [shard.grad for shard in self.zero.single_partition_of_fp32_groups]

    def _accumulate_in_place(self, finish: Callable[[], None]) -> None:
        """Accumulate offloaded gradients in the buffer that the step reads: DeepSpeed 0.19 would keep a second copy.

        At the end of a window they are not copied; only their norms are computed. A parameter that is split between
        ranks, or whose gradient is kept in another dtype, still has its own buffer, which DeepSpeed copies in `finish`.
        """
        in_place: dict[int, Tensor] = {}
        for parameter in (each for group in self.zero.params_in_partition for each in group):
            index = self.zero.get_param_id(parameter)
            group, _, start, length = self.zero.grad_position[index]
            kept = self.zero.single_partition_of_fp32_groups[group].grad
            if length == parameter.numel() and kept.dtype == parameter.dtype:
                in_place[index] = kept.view(-1).narrow(0, start, length)
        self.zero.accumulated_grads_in_cpu.update(in_place)

        def measure() -> None:
            self.zero._wait_for_offload_copies()
            reached = self.zero._offload_accumulated_param_ids
            for index in in_place.keys() & reached:
                self.zero.norm_for_param_grads[index] = in_place[index].norm(2, dtype=torch.float64)
                self.zero.update_offload_overflow_tracker(in_place[index])
            reached.difference_update(in_place)
            finish()

        self.zero._finalize_cpu_offload_gradient_accumulation = measure

    def _step_from_accumulated(self) -> None:
        """Same as `_accumulate_in_place` for stage 3, where gradients are in one buffer, in the order of the groups."""
        end = 0
        for group, shard in zip(self.zero.fp16_groups, self.zero.fp32_partitioned_groups_flat, strict=True):
            start, end = end, end + sum(parameter.partition_numel() for parameter in group)
            gradients = self.zero.grad_partitions_flat_buffer[start:end]
            if shard.grad is not None and Spec.of(shard.grad) == Spec.of(gradients):
                shard.grad = gradients

    def _compare_before(self, reduce: Callable[..., None]) -> None:
        """Make DeepSpeed reduce a bucket only if all ranks have the same parameters in it, in the same order.

        At stage 2 a bucket is filled in the order of backward, and reduced by position: gradients of different
        parameters would be added if the sizes are equal, and gloo aborts if they are not.
        """
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        sentence = _PAIRED.format(name=type(self.module).__name__)

        def compare(comm_dtype: torch.dtype | None = None) -> None:
            buckets = self.zero.ipg_buckets if comm_dtype is None else (comm_dtype,)
            filled = [
                names[self.zero.bit16_groups[group][index]]
                for dtype in buckets
                for group, index, _ in self.zero.ipg_buckets[dtype].params
            ]
            start_comparing(self.runtime, filled, sentence)()
            if filled:  # otherwise the model was frozen, or the gradient of an input was asked for: there is no bucket
                reduce(comm_dtype=comm_dtype)

        self.zero.reduce_ipg_grads = compare

    def _reduce(self) -> None:
        """Average the accumulated gradients, once per window."""
        if self._is_reduced:
            return
        self._refuse_missing()
        self.engine.set_gradient_accumulation_boundary(True)
        if self.stage == 1:
            self.engine.allreduce_gradients()
        else:
            self.zero.finalize_gradient_accumulation_boundary()
        if self.stage == 3 and not self.zero.offload_optimizer:
            # After a backward through the model while it was frozen, DeepSpeed would step with zeros.
            partition, groups = self.zero._get_fp32_grad_state_partition, self.zero.fp16_groups
            self._partitions = self._partitions or [[partition(each, True)[0] for each in group] for group in groups]
            self.zero.averaged_gradients = dict(enumerate(map(list, self._partitions)))
        self._is_reduced = True

    def _refuse_missing(self) -> None:
        """Raise RuntimeError if a parameter has no gradient on this rank: plain PyTorch would not update it.

        Without a message: where other ranks have one, release 0.19 reduces messages of different lengths, and aborts.
        """
        left = set(self.trained) - self._reached
        if left:
            names = [name for parameter, name in self.placeholders.names.items() if parameter in left]
            raise RuntimeError(
                f"{len(names)} parameters of `{type(self.module).__name__}` ({name_some(names)}) got no gradient "
                f"since the last `step` or `zero_grad`. {UNUSED}"
            )

    # Steps

    def step(self) -> None:
        """Step all shards, and all-gather the new weights. Does nothing without gradients, as in PyTorch."""
        self._discard_zeroed()
        if not self._has_gradients:
            self._refuse_own_gradients()
            return
        self.take_changed_weights()
        self._reduce()
        self.engine.step()
        self.remember_weights()
        if self.zero.overflow:
            self.runtime.report(
                f"DeepSpeed skipped a step of `{type(self.module).__name__}`: its gradients are not finite. Weights, "
                "momentum and step counts are unchanged."
            )
            self.discard()
        else:
            self._end_window()
        self._stepped, self._reached = self._reached, set()

    def _refuse_own_gradients(self) -> None:
        """Raise RuntimeError for gradients that the program has assigned: the step would do nothing."""
        own = [each for each in self.trained if each.grad is not None and each.grad.count_nonzero()]
        if own:
            raise RuntimeError(_OWN_GRADIENT.format(name=self.placeholders.names[own[0]]))

    def drive(self, optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """Make `optimizer.step()` and `zero_grad()` run the engine's. Returns a function that undoes it.

        `parameters`: those of each group before DeepSpeed replaced them.
        """
        # Note [The user's optimizer, inside and outside]
        # DeepSpeed calls `step` of the user's optimizer once per slice of the weights, from within its own step.
        # So `step` depends on the caller: called by the user, it runs the hooks, once, and the engine; called by
        # DeepSpeed, only the class's update, which is `__wrapped__` of torch's `step` with hooks. The groups have the
        # parameters of the program outside, and DeepSpeed's shards inside.
        groups = Groups(optimizer, parameters)
        bare = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        running = has_closure = False

        def whole(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            nonlocal running, has_closure
            has_closure, loss = closure is not None, None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self_._opt_called = True  # type: ignore[attr-defined]  # schedulers check it, to warn about a wrong order of steps
            running = True
            try:
                with groups.shards():
                    self.step()
            finally:
                running = False
            self_.step_was_skipped = bool(self.zero.overflow)  # type: ignore[attr-defined]
            return loss

        outside = Optimizer.profile_hook_step(whole)

        def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if running:
                return within(self_)
            return outside(self_) if closure is None else outside(self_, closure)

        def within(self_: Optimizer) -> Any:
            try:
                return bare(self_)
            except TypeError as error:
                if not has_closure:
                    raise
                raise RuntimeError(_CALLS_CLOSURE.format(optimizer=type(self_).__name__)) from error

        def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
            if self._has_gradients or not set_to_none:
                self.discard()
            # As in PyTorch, a parameter whose gradient is zero, not None, is still updated by momentum.
            self._reached = set() if set_to_none else self._reached | self._stepped
            self._stepped = set()

        def add_param_group(self_: Optimizer, param_group: dict[str, Any]) -> None:
            raise RuntimeError(LATE_GROUP.format(optimizer=type(self_).__name__))

        def state_dict(self_: Optimizer) -> dict[str, Any]:
            self._refuse_at_stage_3(self_, "state_dict()")
            with groups.shards():
                return type(self_).state_dict(self_)

        def load_state_dict(self_: Optimizer, state_dict: dict[str, Any]) -> None:
            self._refuse_at_stage_3(self_, "load_state_dict()")
            with groups.shards():
                type(self_).load_state_dict(self_, state_dict)

        functions = (step, zero_grad, add_param_group, state_dict, load_state_dict)
        ours = {function.__name__: MethodType(function, optimizer) for function in functions}
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # Released first: DeepSpeed looks for the shards of every group.
        return undo_all((groups.release, replace_attributes(optimizer, **ours)))

    def _refuse_at_stage_3(self, optimizer: Optimizer, method: str) -> None:
        if self.stage == 3:
            raise RuntimeError(IN_SHARDS.format(optimizer=type(optimizer).__name__, method=method))

    def release(self) -> None:
        """Remove the hooks of DeepSpeed and of this class from the module."""
        self.placeholders.drop()
        self.order.release()
        for hook in self._hooks:
            hook.remove()
        close(self.engine)

    def _groups(self) -> list[list[nn.Parameter]]:
        return self.zero.fp16_groups if self.stage == 3 else self.zero.bit16_groups  # type: ignore[no-any-return]


def remember(objects: Iterable[Any]) -> Callable[[], None]:
    """Return a function that removes all attributes added to the objects after this call."""
    before = [(each, set(vars(each))) for each in objects]

    def forget() -> None:
        for each, names in before:
            for name in set(vars(each)) - names:
                del each.__dict__[name]

    return forget


def gathered_parts(module: nn.Module) -> list[nn.Module]:
    """The submodules that stage 3 gathers one by one: all that own parameters directly."""
    return [part for part in module.modules() if any(each is not None for each in part._parameters.values())]


def close(engine: Any) -> None:
    """Remove the hooks of an engine from its module, and destroy it."""
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    engine.destroy()


_PLAIN_BACKWARD = (
    "`loss.backward()` was called on a loss of `{name}`, but DeepSpeed reduces gradients only in "
    "`fabric.backward(loss)`. Call that."
)
_PAST_FORWARD = (
    "A gradient reached `{name}` of `{model}` in a backward that did not start from the model's outputs: a submodule "
    "was called directly, or the loss is in an object whose tensors cannot be found. DeepSpeed would not reduce its "
    "gradients. Call the model itself, or compute the loss in a method of it, after "
    "`model.mark_forward_method('name')` (stages 1 and 2)."
)
_OWN_GRADIENT = (
    "`optimizer.step()` with a gradient that was assigned to `{name}`, of `torch.autograd.grad` or of a copy of the "
    "model: DeepSpeed steps with the gradients that it has reduced itself. Compute it by `fabric.backward(loss)`, or "
    "pass `strategy='ddp'` and average it: `parameter.grad = fabric.all_reduce(gradient)`."
)
_OTHER_WEIGHT = (
    "`{name}.data` was replaced after `fabric.setup` by {now}, but DeepSpeed trains {then}. Keep shape, dtype and "
    "device."
)
_RUN_TWICE = (
    "A second backward through one forward of `{name}`: at ZeRO stage 3 the weights were released after the first. Add "
    "the losses and call `fabric.backward` once, or use stage 2."
)
NEVER_TRAINED = (
    "DeepSpeed trains the shards that it made then, so these would not be trained. Before `fabric.setup`, add all "
    "layers, and call `requires_grad_()` on all parameters that are ever trained; or set up the model again in a new "
    "`Fabric`, or pass `strategy='ddp'`."
)
_CLIPPED = (
    "{count} gradients of `{name}` were zeroed between `clip_gradients` and `optimizer.step()`, and others were not. "
    "Under DeepSpeed, clipping ends the accumulation window: zero some before clipping, or all after it."
)
_PAIRED = (
    "Ranks computed gradients of different parameters of `{name}`, or in a different order, and DeepSpeed adds "
    "gradients by their position. Use the same parameters in the same order on every rank, or pass "
    "`strategy='ddp_find_unused_parameters_true'`."
)
UNUSED = (
    "DeepSpeed would step them as if it were zero, with momentum and weight decay, whereas PyTorch leaves them "
    "unchanged. Freeze those that are never used, by `requires_grad_(False)` before `setup`; for those that only some "
    "steps use, keep gradients of zero (`optimizer.zero_grad(set_to_none=False)`). Or pass `strategy='fsdp'` if all "
    "ranks use the same parameters in a step, and `strategy='ddp_find_unused_parameters_true'` if they do not."
)
_CALLS_CLOSURE = (
    "`{optimizer}.step` calls its closure itself, and under `strategy='deepspeed'` it runs within DeepSpeed's step, on "
    "shards, after the closure has run once. Use an optimizer that needs the gradients of one backward (SGD, AdamW), "
    "or pass `strategy='ddp'` or 'fsdp'."
)
NOT_GATHERED = (
    "at ZeRO stage 3 the weights are gathered only around `forward`. Call the model itself, and call the method in its "
    "`forward`; or use stage 2, which does not shard the weights."
)
