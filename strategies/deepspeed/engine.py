"""One model under ZeRO: forward, backward, clipping, and the steps of the user's own optimizer by DeepSpeed's engine.

The engine is never told which backward is the last of an accumulation window, so gradients accumulate over any number
of backwards, as in plain PyTorch. The reduction is completed once, when gradients are first needed: in `clip_gradients`
or `step()`. Accesses DeepSpeed's gradient shards directly (0.19): DeepSpeed's own clipping supports one norm, and runs
within `step`.

`no_backward_sync` changes nothing: at stage 1 gradients are reduced once per step in any case, at stages 2 and 3 in
every backward, because no rank stores whole gradients.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero, buffers_of
from fabric.strategies.deepspeed.library import STAGE_3, look_up
from fabric.strategies.deepspeed.released import LOST, ReleasedParameters
from fabric.strategies.deepspeed.state import as_changed
from fabric.strategies.gradients.clipping import norm_of, over_ranks
from fabric.strategies.gradients.sync import NOT_ALONE, Factor, Finish, GradientSync, multiply
from fabric.strategies.module.deepcopy import Hook
from fabric.strategies.module.output_tensors import tensors_requiring_grad
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.precision.loss_scaler import all_finite
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder, start_comparing
from fabric.strategies.tensors.gradient_placeholder import GradientPlaceholder
from fabric.strategies.tensors.parameters import name_some
from fabric.strategies.torch_internals import after_backward
from fabric.strategies.undo import hold_weakly, replace_attributes


@final
class Engine(GradientSync):
    """A DeepSpeed engine with an optimizer.

    Between a backward and the next use of the gradients, each parameter with a gradient has a placeholder in
    `parameter.grad`. At stages 2 and 3 DeepSpeed moves gradients elsewhere, so `model.zero_grad()` would find nothing
    to zero; at stage 1 the gradient of this rank would be read as the average. As gradients do in PyTorch, placeholders
    stay after a step.
    """

    def __init__(
        self, runtime: Runtime, module: nn.Module, engine: Any, stage: int, *, broadcast_buffers: bool
    ) -> None:
        self.runtime, self.module, self.engine, self.stage = runtime, module, engine, stage
        self.zero = engine.optimizer
        if stage == 3:
            look_up(STAGE_3)
            groups, self._offloads = self.zero.fp16_groups, bool(self.zero.offload_optimizer)
            sizes = [sum(each.partition_numel() for each in group) for group in groups]
            self._by_group = {n: [part] for n, part in enumerate(self.zero.grad_partitions_flat_buffer.split(sizes))}
            self._flats: list[Tensor] = self.zero.fp32_partitioned_groups_flat
        else:
            groups, self._offloads = self.zero.bit16_groups, bool(self.zero.cpu_offload)
            self._flats = self.zero.single_partition_of_fp32_groups
        self.trained: list[Tensor] = [parameter for group in groups for parameter in group]
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._watched = list(self._names) if stage == 3 else self.trained
        self._place: Callable[[Tensor], int] = attrgetter("_version") if stage == 3 else Tensor.data_ptr
        self.released = ReleasedParameters(module)
        self._places = list(map(self._place, self._watched))
        synchronised = broadcast_buffers and runtime.world.size > 1
        self._buffered = [part for part in module.modules() if part._buffers] if synchronised else []
        broadcast_from_rank_zero(runtime.collective, buffers_of(self._buffered))
        self.units = gathered_parts(module) if stage == 3 else ()
        self.order = ExecutionOrder(runtime, module, self.units)
        self._added_parameters = AddedParameters(module, unfrozen=True, frozen=stage == 3)

        self._arrived: list[Tensor] = []  # parameters that got a gradient in this backward, in order
        self._reached: set[Tensor] = set()  # since gradients were last set to None
        self._placeholders: dict[Tensor, GradientPlaceholder] = {}
        self._unreduced: dict[Tensor, Tensor] = {}  # at stage 1, between backwards: this rank's gradients
        self._has_gradients = self._is_reduced = self._is_stepped = self._in_backward = self._is_started = False
        self._outside, self._leaves_inference_mode = ExitStack(), False
        self._hooks: list[RemovableHandle] = [
            each.register_post_accumulate_grad_hook(self._arrived.append)  # type: ignore[no-untyped-call]
            for each in self.trained
        ]
        self._kept = list(map(hold_weakly, self.zero._grad_acc_hooks))
        if stage == 3:  # before DeepSpeed's hooks, which do not know added parameters
            self._hooks.append(module.register_forward_pre_hook(Hook(self._before_forward), prepend=True))
        self.discard()

    # Forward and backward

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self.released.refuse_changes()
        if torch.is_grad_enabled():
            self._added_parameters.refuse(NEVER_TRAINED)
        elif torch.is_inference_mode_enabled():  # DeepSpeed assigns what it gathers to the parameters
            if not self._leaves_inference_mode:  # after DeepSpeed's hooks, which free parameters
                self._leaves_inference_mode = True
                after = Hook(lambda *_: self._outside.close())
                self._hooks.append(module.register_forward_hook(after, always_call=True))
            self._outside.enter_context(torch.inference_mode(False))
            self._outside.enter_context(torch.no_grad())

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the module, so that the engine handles the backward of its outputs."""
        if self.stage != 3 and torch.is_grad_enabled():
            self._added_parameters.refuse(NEVER_TRAINED)
        try:
            output = function(*args, **kwargs)
        except (AssertionError, RuntimeError, TypeError) as error:
            for words, sentence in _OF_HOOKS if self.stage == 3 else ():
                if words in str(error):
                    raise RuntimeError(sentence.format(error=error)) from error
            raise
        is_searched = self.stage != 3 or isinstance(output, (Tensor, list, tuple, dict, type(None)))
        if not is_searched and "__dict__" not in dir(output):
            raise RuntimeError(_UNSEARCHED)
        if not torch.is_grad_enabled():
            self.released.fill()
            return output
        if self._buffered:
            broadcast_from_rank_zero(self.runtime.collective, buffers_of(self._buffered))
        start = partial(self._start, [])
        for tensor in tensors_requiring_grad(output):
            tensor.register_hook(start)  # type: ignore[no-untyped-call]
        return output

    def watch(self) -> Finish | None:
        if self._in_backward:  # the last backward raised, and left gradients of a part of the model
            self._abandon()
        self._take_placeholders()
        if self._arrived and not self._in_backward:
            raise RuntimeError(_PLAIN_BACKWARD.format(name=type(self.module).__name__))
        self._arrived.clear()
        self._in_backward, self._is_started = True, False
        self.zero.clear_backward_seen_flag()
        return self._finish

    def _finish(self) -> None:
        if self.stage == 3 and (compare := self.order.watch()) is not None:
            compare()
        self._in_backward = False
        if self._arrived and not self._is_started:
            name, model = self._names[self._arrived[0]], type(self.module).__name__
            raise RuntimeError(_PAST_FORWARD.format(name=name, model=model))
        self._has_gradients = self._has_gradients or bool(self._arrived)
        self._reached.update(self._arrived)
        self._arrived.clear()
        self._set_placeholders()

    def _start(self, backwards: list[int], _: Tensor) -> None:
        """Start the engine's backward, when the first output of a forward is reached. `backwards`: of this forward."""
        if self._is_started:
            return
        if backwards and self.stage == 3:
            raise RuntimeError(_RUN_TWICE.format(name=type(self.module).__name__))
        if self._is_reduced:
            raise RuntimeError(_CLIPPED.format(name=type(self.module).__name__))
        self._is_started = True
        backwards.append(1)
        if self.stage == 2:
            self.zero.setup_buckets()  # DeepSpeed reduces one after each backward, even one without gradients
            if self._in_backward and self.runtime.world.size > 1:
                after_backward(self._compare_order)  # before DeepSpeed's callback, which reduces the last bucket
        self.engine._backward_prologue()

    def _compare_order(self) -> None:
        """Raise RuntimeError if ranks computed gradients of different parameters, or in another order.

        At stage 2 a bucket is filled in the order of backward, and reduced by position: gradients of different
        parameters of equal size would be added.
        """
        arrived = list(map(self._names.__getitem__, self._arrived))
        start_comparing(self.runtime, arrived, _PAIRED.format(name=type(self.module).__name__))()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        if self.stage == 3:
            raise ValueError(NOT_ALONE.format(why="ZeRO stage 3 cannot go on after a forward that was cut short"))
        try:
            yield
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Discard all gradients, also those of a backward that was cut short."""
        self._reached.clear()
        self._arrived.clear()
        self.discard()
        self._in_backward = False
        self.zero.exit_backward()
        if self.stage != 3:
            for bucket in self.zero.ipg_buckets.values():
                bucket.clear()
            self.zero._release_ipg_buffers()
            self.zero.params_already_reduced[:] = [False] * len(self.zero.params_already_reduced)

    def parameters_held(self) -> Iterable[Tensor]:
        return self.trained

    def scale(self, factor: Factor) -> None:
        with self.gradients() as shards:
            multiply(shards, factor)

    # Gradients

    def clip_norm(self, _: Sequence[Optimizer], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients so that their norm over all shards is at most `max_norm`. Returns the former norm."""
        order = float(norm_type)
        with self.gradients() as shards:
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
        held = [shard for shard in shards if shard.numel()]
        local = norm_of(held, order) if held else torch.zeros((), device=self.runtime.device)
        return over_ranks(self.runtime.collective, local, order) / float(self.zero.loss_scale)

    def clip_value(self, _: Sequence[Optimizer], clip_val: float) -> None:
        """Clamp each gradient to `[-clip_val, clip_val]`."""
        bound = clip_val * float(self.zero.loss_scale)
        with self.gradients() as shards:
            for shard in shards:
                shard.clamp_(-bound, bound)

    def is_finite(self, _: Optimizer) -> bool:
        """Whether all gradients are finite on all ranks. Ends the accumulation window, as clipping does."""
        with self.gradients() as shards:
            found = all_finite(shards)
        return self.runtime.collective.reduce_boolean_decision(found)

    @contextmanager
    def gradients(self) -> Iterator[list[Tensor]]:
        """Context: this rank's shards of the averaged gradients, to be changed in place. Ends the window."""
        self._take_placeholders()
        try:
            self._reduce()
            if not self._has_gradients:
                yield []
            elif self._offloads:
                yield [flat.grad for flat in self._flats if flat.grad is not None]
            elif self.stage == 3:
                yield [self.zero.grad_partitions_flat_buffer]
            else:
                yield [shard for group in self.zero.averaged_gradients.values() for shard in group]
        finally:
            self._set_placeholders()

    def discard(self) -> None:
        """Discard all gradients and start an accumulation window."""
        self.zero.zero_grad(set_to_none=True)
        self.engine.set_gradient_accumulation_boundary(False)
        kept: list[Tensor] = [flat.grad for flat in self._flats if flat.grad is not None] if self._offloads else []
        if self.stage == 3:
            kept.append(self.zero.grad_partitions_flat_buffer)
        else:
            self.zero.micro_step_id = -1
            # In place: parameters refer to this dictionary.
            self.zero.averaged_gradients.update(dict.fromkeys(self.zero.averaged_gradients))
            self.zero.all_grad_tensors = {}
            if self._offloads:
                self.zero.reset_cpu_buffers()
                kept += self.zero.accumulated_grads_in_cpu.values()
        for buffer in kept:
            buffer.zero_()
        self._has_gradients = self._is_reduced = False
        self._unreduced = {}

    def _reduce(self) -> None:
        """Average the accumulated gradients, once per window.

        Raises: RuntimeError: a parameter has no gradient on this rank. Plain PyTorch leaves such a parameter unchanged;
        release 0.19 aborts if other ranks have a gradient for it, because messages then differ in length.
        """
        if self._is_reduced or not self._has_gradients:
            return
        if len(self._reached) < len(self.trained):
            names = [self._names[parameter] for parameter in self.trained if parameter not in self._reached]
            raise RuntimeError(
                f"{len(names)} parameters of `{type(self.module).__name__}` ({name_some(names)}) got no gradient "
                f"since the last `step` or `zero_grad`. {UNUSED}"
            )
        self.engine.set_gradient_accumulation_boundary(True)
        if self.stage == 1:
            self.engine.allreduce_gradients()
        else:
            self.zero.finalize_gradient_accumulation_boundary()
        if self.stage == 3 and not self._offloads:
            # After a backward through the model while it was frozen, DeepSpeed would step with zeros.
            self.zero.averaged_gradients = dict(self._by_group)
        self._is_reduced = True

    # Placeholders

    def _set_placeholders(self) -> None:
        """Set a placeholder as the gradient of each parameter that has one."""
        for parameter, placeholder in self.released.placeholders.items():
            if not parameter.numel():
                parameter.data = placeholder
        if self.stage == 1 and self._has_gradients and not self._is_reduced:
            self._unreduced = {each: each.grad for each in self._reached if each.grad is not None}
        for parameter in self._reached:
            try:
                parameter.grad = self._placeholders[parameter]
            except (KeyError, RuntimeError):  # there is none, or it was made for the gathered parameter (stage 3)
                parameter.grad = self._placeholders[parameter] = GradientPlaceholder(parameter, _READ)

    def _take_placeholders(self) -> None:
        """Remove the placeholders, and discard the gradients if the program has zeroed them since the last backward."""
        gone, num_zeroed, num_reached = [], 0, len(self._reached)
        for parameter in self._reached:
            gradient, placeholder = parameter.grad, self._placeholders[parameter]
            if gradient is None:
                gone.append(parameter)
            elif gradient is not placeholder:
                raise RuntimeError(_ASSIGNED.format(name=self._names[parameter]))
            elif placeholder.is_zeroed:
                num_zeroed += 1
        num_discarded = len(gone) + num_zeroed
        self._is_stepped = self._is_stepped and num_discarded < num_reached
        if self._has_gradients and 0 < num_discarded < num_reached:
            raise RuntimeError(_ZEROED_IN_PART.format(name=type(self.module).__name__, count=num_discarded))
        for parameter in self._reached:
            parameter.grad, self._placeholders[parameter].is_zeroed = None, False
        self._reached.difference_update(gone)
        if self._has_gradients and num_discarded:
            self.discard()
        for parameter, gradient in self._unreduced.items():
            parameter.grad = gradient
        self._unreduced = {}

    # Weights and steps

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """`optimizer.step(closure)`: step all shards, and all-gather the new weights. Does nothing without gradients,
        as in PyTorch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it, to warn about a wrong order of steps
        optimizer.step_was_skipped = False  # type: ignore[attr-defined]
        self._take_placeholders()
        try:
            if self._is_stepped:  # a backward in between is right: it may be a critic's, zeroed next
                raise RuntimeError(_STEPPED.format(name=type(self.module).__name__))
            if not self._has_gradients:
                self._refuse_other_gradients()
                return loss
            self._take_changed_weights()
            self._reduce()
            self._step_shards(optimizer)
            self.discard()
            self._is_stepped = True
        except TypeError as error:
            if closure is None:
                raise
            raise RuntimeError(_CALLS_CLOSURE.format(optimizer=type(optimizer).__name__)) from error
        finally:
            self._set_placeholders()
        if self.zero.overflow:
            optimizer.step_was_skipped = True  # type: ignore[attr-defined]
            self.runtime.report(
                f"DeepSpeed skipped a step of `{type(self.module).__name__}`: its gradients are not finite. Weights, "
                "momentum and step counts are unchanged."
            )
        return loss

    def _step_shards(self, optimizer: Optimizer) -> None:
        """Step DeepSpeed's optimizer with the hyperparameters of the user's optimizer, and copy back those that the
        step changes."""
        stepped, groups = self.zero.optimizer.param_groups, optimizer.param_groups
        if len(groups) != self._num_groups:
            raise RuntimeError(_LATE_GROUP.format(optimizer=type(optimizer).__name__))
        for shards, number in zip(stepped, self._groups, strict=True):
            shards.update(groups[number], params=shards["params"])
        self.engine.step()
        for shards, number in zip(stepped, self._groups, strict=True):
            groups[number].update(shards, params=groups[number]["params"])

    def _refuse_other_gradients(self) -> None:
        """Raise RuntimeError for gradients that `fabric.backward` has not computed: the step would do nothing."""
        if self._arrived and not self._in_backward:
            raise RuntimeError(_PLAIN_BACKWARD.format(name=type(self.module).__name__))
        own = [each for each in self.trained if each.grad is not None and each.grad.count_nonzero()]
        if own:
            raise RuntimeError(_OWN_GRADIENT.format(name=self._names[own[0]]))

    def _take_changed_weights(self) -> None:
        """Write what the program has changed in the weights since the last step into the shards that DeepSpeed trains.

        At stage 3 a weight has no values between forwards, so a change is lost, and raises RuntimeError: here if the
        version counter shows the change, before the next forward if it was made through `.data` (`ReleasedParameters`).
        """
        places = list(map(self._place, self._watched))
        if places != self._places:
            moved = next(n for n, place in enumerate(places) if place != self._places[n])
            name = self._names[self._watched[moved]]
            if self.stage == 3:
                raise RuntimeError(LOST.format(name=f"`{name}`", how="changed in place"))
            raise RuntimeError(_MOVED.format(name=name))
        if self.stage == 3:
            return
        for parts, trained in zip(self.zero.parallel_partitioned_bit16_groups, self._flats, strict=True):
            weight = parts[self.runtime.world.rank]
            trained.data.copy_(weight if weight.dtype == trained.dtype else as_changed(trained.data, weight))

    def trained_shards(self) -> list[Tensor]:
        """See `TrainedWeights`."""
        self._take_changed_weights()
        return [flat.detach() for flat in self._flats]

    def gather_trained(self) -> None:
        """Make the model's weights from the shards that DeepSpeed trains, as after a step. Ranks: all."""
        if self.stage != 3:
            self.zero.update_lp_params()
            return
        self.zero.checkpoint_event_prologue()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        self.zero.checkpoint_event_epilogue()

    def drive(self, optimizer: Optimizer) -> Callable[[], None]:
        """Make `optimizer.step()` step the engine. Returns a function that undoes it.

        The engine steps a copy of the optimizer, made by `copy_of`, whose groups hold shards. So the program's
        optimizer keeps its parameters, and hooks and schedulers run once a step.
        """

        self._num_groups = len(optimizer.param_groups)
        self._groups = [number for number, group in enumerate(optimizer.param_groups) if is_trained(group)]
        whole = Optimizer.profile_hook_step(self.step)
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            whole._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        restore = replace_attributes(optimizer, step=MethodType(whole, optimizer))
        hooks = [
            optimizer.register_state_dict_pre_hook(_refuse_state),
            optimizer.register_load_state_dict_pre_hook(_refuse_state),
        ]

        def release() -> None:
            restore()
            for hook in hooks:
                hook.remove()

        return release

    def release(self) -> None:
        """Remove the hooks of DeepSpeed and of this class from the module."""
        for parameter in self._reached:
            parameter.grad = None
        self.released.close()
        self.order.release()
        for hook in self._hooks:
            hook.remove()
        close(self.engine)


def is_trained(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group holds a parameter that requires a gradient."""
    return any(parameter.requires_grad for parameter in group["params"])


def copy_of(optimizer: Optimizer) -> Optimizer:
    """A copy of the optimizer without state and hooks, as by unpickling, with the parameter groups that are trained:
    DeepSpeed removes empty groups, and fails on frozen ones."""
    made: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if not name.endswith("_hooks")}
    groups = [dict(group) for group in optimizer.param_groups if is_trained(group)]
    made.__setstate__({**own, "state": defaultdict(dict), "param_groups": groups})
    plain = getattr(type(made).step, "__wrapped__", type(made).step)  # the program's optimizer runs global hooks
    made.step = MethodType(plain, made)  # type: ignore[method-assign]
    return made


def _refuse_state(optimizer: Optimizer, *_: Any) -> None:
    raise RuntimeError(_STATE.format(optimizer=type(optimizer).__name__))


def gathered_parts(module: nn.Module) -> list[nn.Module]:
    """The submodules that stage 3 gathers one by one: all that own parameters directly."""
    return [part for part in module.modules() if any(each is not None for each in part._parameters.values())]


def close(engine: Any) -> None:
    """Remove the hooks of an engine from its module, and destroy it."""
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    engine.destroy()


_UNSEARCHED = (
    "The model, or a submodule, returned a number, a string, a set or an object with `__slots__`, which DeepSpeed's "
    "hooks at stage 3 cannot search for parameters. Return tensors, lists, tuples, dictionaries, or objects without "
    "`__slots__`; a number within a tuple is right."
)
_OF_HOOKS = (
    (
        "NestedTensor",
        "A submodule was called with nested tensors, which DeepSpeed's hooks at stage 3 cannot pass on: {error} Write "
        "`nn.TransformerEncoder(..., enable_nested_tensor=False)`, or make nested tensors with `layout=torch.jagged`.",
    ),
    ("vars() argument must have", _UNSEARCHED),
)
"""Words of errors of DeepSpeed's hooks around submodules at stage 3, and what to write instead."""
_PLAIN_BACKWARD = (
    "`loss.backward()` was called on a loss of `{name}`, but DeepSpeed reduces gradients only in "
    "`fabric.backward(loss)`. Call that."
)
_PAST_FORWARD = (
    "A gradient reached `{name}` of `{model}` in a backward that did not start from the model's outputs: a submodule "
    "was called directly, an output that is a view was changed in place (`logits /= 2`), or the loss is in an object "
    "whose tensors cannot be found. DeepSpeed would not reduce its gradients. Call the model itself, write "
    "`logits = logits / 2`, or compute the loss in a method of the model, after `model.mark_forward_method('name')` "
    "(stages 1 and 2)."
)
_STEPPED = (
    "A step of `{name}` whose gradients were not zeroed since the last step. Plain PyTorch would use these gradients "
    "again, but DeepSpeed has discarded them. Call `optimizer.zero_grad()` after each step."
)
_READ = (
    "that DeepSpeed keeps, in shards or not averaged yet: `parameter.grad` has no values here. To clip, or for the "
    "norm, call `fabric.clip_gradients(model, optimizer, max_norm=...)`; to read gradients, use `strategy='ddp'`."
)
_ASSIGNED = (
    "Another gradient was assigned to `{name}.grad`, but DeepSpeed would step with the one that it keeps. "
    "Change the loss instead, or use `strategy='ddp'`. `None` discards the gradient."
)
_OWN_GRADIENT = (
    "`optimizer.step()` with a gradient that was assigned to `{name}`, of `torch.autograd.grad` or of a copy of the "
    "model: DeepSpeed steps with the gradients that it has reduced itself. Compute the gradient by "
    "`fabric.backward(loss)`, or pass `strategy='ddp'` and average it: `parameter.grad = fabric.all_reduce(gradient)`."
)
_ZEROED_IN_PART = (
    "{count} gradients of `{name}` were zeroed since the last backward, and others were not: DeepSpeed keeps all "
    "gradients together. Zero all of them, or pass `strategy='ddp'` or 'fsdp'."
)
_CLIPPED = (
    "A backward of `{name}` after its gradients were averaged, and before `optimizer.step()`: under DeepSpeed the "
    "accumulation window ends with `clip_gradients`, with a synchronised `backward(weight=...)`, and under "
    "`fabric verify`, which reads gradients, with any synchronised backward. Run all backwards of a step but the last "
    "within `fabric.accumulate` or `no_backward_sync`, and clip after the last one."
)
_MOVED = (
    "`{name}.data` was replaced after `fabric.setup`, but DeepSpeed trains the tensor that `setup` found there. Write "
    "the values into that tensor: `parameter.data.copy_(values)`."
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
_PAIRED = (
    "Ranks computed gradients of different parameters of `{name}`, or in a different order, and DeepSpeed adds "
    "gradients by their position. Use the same parameters in the same order on every rank, or pass "
    "`strategy='ddp_find_unused_parameters_true'`."
)
UNUSED = (
    "DeepSpeed would step them with gradients of zero, momentum and weight decay, whereas PyTorch leaves them "
    "unchanged. Freeze parameters that are never used, by `requires_grad_(False)` before `setup`; for parameters that "
    "only some steps use, keep gradients of zero (`optimizer.zero_grad(set_to_none=False)`). Or pass `strategy='fsdp'` "
    "if all ranks use the same parameters in a step, otherwise `strategy='ddp_find_unused_parameters_true'`."
)
_CALLS_CLOSURE = (
    "`{optimizer}.step` calls its closure itself, and under `strategy='deepspeed'` it runs within DeepSpeed's step, on "
    "shards, after the closure has run once. Use an optimizer that needs the gradients of one backward (SGD, AdamW), "
    "or pass `strategy='ddp'` or 'fsdp'."
)
_LATE_GROUP = (
    "A parameter group was added to `{optimizer}` after `fabric.setup`: DeepSpeed steps the shards that it made then, "
    "so this group would not be trained. Add it before `fabric.setup`, with `lr=0` until it is to be trained; or set "
    "up the model again in a new `Fabric`, or pass `strategy='ddp'`."
)
_STATE = (
    "`state_dict()` or `load_state_dict()` of `{optimizer}`: under DeepSpeed its state is of flat shards, which belong "
    "to no parameter. Call `fabric.state_dict(model, optimizer)`, `fabric.save` and `fabric.load`."
)
NOT_GATHERED = (
    "at ZeRO stage 3 the weights are gathered only around `forward`. Call the model itself, and call the method in its "
    "`forward`; or use stage 2, which does not shard the weights."
)
