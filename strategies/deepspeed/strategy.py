"""DeepSpeed's ZeRO: optimizer states, gradients and weights in shards over the ranks (Rajbhandari et al., SC 2020).

Each model has its own engine, which runs behind the user's module and optimizer, so the loop is the same as for any
other strategy. Two differences: a parameter without a gradient in an accumulation window raises, because DeepSpeed
would step it anyway; at stage 3 the weights are sharded and are freed with the fabric, so save before `close()`, and
all ranks must run the same submodules in the same order, as under `fsdp`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer
from torch.optim.swa_utils import AveragedModel

from fabric.strategies.capabilities import Capability, Target, releases
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero
from fabric.strategies.deepspeed.config import PRECISIONS, choose_offload, choose_stage, engine_config, read_config
from fabric.strategies.deepspeed.engine import NOT_GATHERED, UNUSED, Engine, close, copy_of, gathered_parts, is_trained
from fabric.strategies.deepspeed.library import forget_models, join, local_rank, why_not, with_environment
from fabric.strategies.deepspeed.released import ReleasedParameters, hide_shapes, in_shards, is_sharded
from fabric.strategies.deepspeed.state import LossScale, ZeroState
from fabric.strategies.gradients.bare_parameters import IN_MODULE
from fabric.strategies.gradients.sync import LocalGradientSync
from fabric.strategies.module.deepcopy import Hook, hooks_of, refuse_copies
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.module.initialization import new_tensors
from fabric.strategies.module.model_checks import refuse_sparse_layers, refuse_wrapped_in_flat
from fabric.strategies.optimizers.elementwise import MODES, has_modes, refuse_dependent
from fabric.strategies.prepared import Prepared, TrainedWeights, make_contiguous, make_prepared, place, with_precision
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import SHARDS, Layout, Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder
from fabric.strategies.tensors.parameters import uncompiled
from fabric.strategies.tensors.wrapper_subclass import frozen_wrapped
from fabric.strategies.torch_internals import disable_dynamo


@final
@dataclass(frozen=True, kw_only=True)
class DeepSpeedStrategy(ProcessGroupStrategy):
    """ZeRO by DeepSpeed: one process per device, each with its share of the data and a shard of what `stage` selects.

    One loss may run through several models. `no_backward_sync` does not change results: at stage 1
    gradients are reduced once per step in any case, at stages 2 and 3 in every backward, because no rank stores whole
    gradients.

    Args:
        stage: 1: shard optimizer states. 2 (the default): gradients, too. 3: weights, too.
        offload_optimizer: Keep optimizer states in main memory, and step on the CPU.
        offload_parameters: Keep weights in main memory between uses. Stage 3 only.
        config: DeepSpeed's configuration: a dictionary, or a JSON file, which is read when the strategy is constructed.
            Unknown keys raise.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 after each forward that
            computes gradients.
    """

    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", read_config(self.config))
        stage, offload = self._stage, self._offload
        if stage != 3 and offload.get("offload_param", {}).get("device", "none") != "none":
            raise ValueError(
                f"Parameters can be offloaded only if they are sharded, at stage 3, and this is stage {stage}. "
                "Write `stage=3`, or offload only the optimizer."
            )
        if stage == 1 and self._config.get("zero_optimization", {}).get("overlap_comm"):
            raise ValueError(
                "`overlap_comm` at stage 1: the gradients of a window are averaged once, in `step()`, when no backward "
                "is running that could overlap. Leave it out, or write `stage=2`."
            )

    @property
    def lacks(self) -> Mapping[Capability, str]:
        always: dict[Capability, str] = {
            "several_optimizers": _ONE_OPTIMIZER,
            "later_optimizers": _LATER,
            "joint_optimizer": _LATER,
            "unused": UNUSED,
            "bare_parameters": IN_MODULE,
        }
        if self._stage != 3:
            return always
        return {**always, "compile_before": _COMPILED, "methods": NOT_GATHERED, "copies": _IN_SHARDS}

    def look_for_packages(self) -> Mapping[str, str]:
        return releases("deepspeed")

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        """At stage 1 an optimizer steps with gradients that it reduces to the rank of each shard."""
        is_last = self._stage == 3
        return replace(SHARDS, weights="shards" if is_last else "replicas", forward_communicates=is_last)

    def why_not(self, target: Target) -> str | None:
        missing = why_not(target.packages.get("deepspeed"))
        if missing is not None:
            return missing
        precision = target.precision
        if precision.name not in PRECISIONS:
            return (
                f"`precision={precision.name!r}` with `strategy='deepspeed'`: DeepSpeed keeps float32 weights and "
                f"computes in float32, bfloat16 or float16. Write one of {', '.join(map(repr, PRECISIONS))}."
            )
        if precision.name == "16-true" and target.accelerator.name == "cpu":
            return (
                "`precision='16-true'` with `strategy='deepspeed'` on CPU: DeepSpeed has no float16 there. "
                "Write 'bf16-true' or 'bf16-mixed'."
            )
        if "fp16" in self._config and precision.name != "16-true":
            return (
                f"`fp16` in DeepSpeed's configuration is for `precision='16-true'`, but the precision is "
                f"{precision.name!r}. Leave one out."
            )
        return None

    def when_connected(self, runtime: Runtime) -> None:
        join(runtime.world, runtime.device.type)

    @contextmanager
    def init_module(self, runtime: Runtime, *, empty: bool) -> Iterator[None]:
        """At stage 3 each parameter is sharded as soon as it is created, with rank 0's values."""
        if self._stage != 3:
            with new_tensors(runtime.device, runtime.precision, empty=empty):
                yield
            return
        with in_shards(runtime, self._engine_config(runtime)):
            yield

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        _refuse_setup(runtime, module, optimizers, stage=self._stage)
        if self._stage == 3:
            forget_models()
        with ExitStack() as stack:
            stack.enter_context(local_rank(runtime.world))
            if optimizers:
                return self._trained(runtime, module, optimizers[0], move, stack)
            return self._untrained(runtime, module, move, stack)

    def _trained(
        self, runtime: Runtime, module: nn.Module, optimizer: Optimizer, move: bool, stack: ExitStack
    ) -> Prepared:
        """A model with its optimizer, in an engine."""
        before = optimizer.state_dict() if optimizer.state else None
        optimizer.state.clear()  # states of the parameters before they were sharded
        forget = _remember((*module.modules(), *module.parameters()))
        groups = [list(group["params"]) for group in optimizer.param_groups]
        engine = self._initialize(runtime, module, copy_of(optimizer), move)
        sync = Engine(runtime, module, engine, self._stage, broadcast_buffers=self.broadcast_buffers)
        state = ZeroState(runtime.world, self._stage, engine.optimizer, groups, sync.gradients, sync.released)
        if self._stage != 3:  # at stage 3 the weights stay sharded and need DeepSpeed's attributes
            stack.callback(forget)
        stack.callback(sync.release)
        stack.callback(sync.drive(optimizer))
        around = with_precision(runtime, sync.order.around(sync.forward))
        path = ForwardPath(module, around, self._refuse_mark)
        stack.callback(path.release)
        if before is not None:
            state.write_optimizer(optimizer, before)
        scales = engine.optimizer.needs_scaler()
        return replace(
            make_prepared(runtime, module, (optimizer,), sync, path),
            scale_loss=engine.scale if scales else None,
            joins_backward=not scales,
            loss_scale=LossScale(engine.optimizer.loss_scaler) if engine.optimizer.loss_scaler.dynamic else None,
            clip_norm=sync.clip_norm,
            clip_value=sync.clip_value,
            is_finite=sync.is_finite,
            release=stack.pop_all().close,
            state=state,
            trained=TrainedWeights(shards=sync.trained_shards, written=sync.gather_trained),
        )

    def _refuse_mark(self, method: str) -> None:
        if self._stage == 3:
            raise RuntimeError(f"`mark_forward_method({method!r})`: {NOT_GATHERED}")

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        raise RuntimeError(_LATER)

    @property
    def _config(self) -> dict[str, Any]:
        assert isinstance(self.config, dict)  # read by __post_init__
        return self.config

    @property
    def _stage(self) -> int:
        return choose_stage(self.stage, self._config)

    @property
    def _offload(self) -> dict[str, Any]:
        return {
            **choose_offload("offload_optimizer", self.offload_optimizer, "offload_optimizer", self._config),
            **choose_offload("offload_param", self.offload_parameters, "offload_parameters", self._config),
        }

    def _engine_config(self, runtime: Runtime) -> dict[str, Any]:
        return engine_config(self._config, stage=self._stage, offload=self._offload, precision=runtime.precision)

    def _initialize(self, runtime: Runtime, module: nn.Module, optimizer: Optimizer | None, move: bool) -> Any:
        if any(map(is_sharded, module.parameters())):
            hide_shapes(module)
        else:
            place(runtime, module, (), move=move)
            make_contiguous(module)
        with (
            with_environment(runtime.world, runtime.device.type) as deepspeed,
            _own_hooks(module, are_copied=self._stage != 3),
            _scalars_broadcast(runtime, module, self._stage),
            _wrapped_hidden(runtime, module),
        ):
            engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
                config=self._engine_config(runtime),
                dist_init_required=False,
            )
        if self._stage == 3:
            refuse_copies(module, _IN_SHARDS)
        return engine

    def _untrained(self, runtime: Runtime, module: nn.Module, move: bool, stack: ExitStack) -> Prepared:
        """Set up a model without an optimizer: replicated, at stage 3 sharded. It cannot be trained."""
        name = type(module).__name__

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(_NO_OPTIMIZER.format(name=name))

        around = None
        if self._stage == 3:
            stack.callback(close, self._initialize(runtime, module, None, move))
            order = ExecutionOrder(runtime, module, gathered_parts(module))
            stack.callback(order.release)
            released = ReleasedParameters(module)
            stack.callback(released.close)

            def release(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                released.refuse_changes()
                output = function(*args, **kwargs)
                released.fill()
                return output

            around = order.around(release)
            broadcast_from_rank_zero(runtime.collective, module.buffers())
        else:
            released = ReleasedParameters(module)
            place(runtime, module, (), move=move)
            broadcast_from_rank_zero(runtime.collective, [*module.parameters(), *module.buffers()])
        path = ForwardPath(module, with_precision(runtime, around), self._refuse_mark)
        stack.callback(path.release)
        return replace(
            make_prepared(runtime, module, (), LocalGradientSync(module), path),
            scale_loss=refuse,
            clip_norm=refuse,
            clip_value=refuse,
            is_finite=refuse,
            release=stack.pop_all().close,
            state=ZeroState(runtime.world, self._stage, None, (), nullcontext, released),
        )


@contextmanager
def _scalars_broadcast(runtime: Runtime, module: nn.Module, stage: int) -> Iterator[None]:
    """Let DeepSpeed 0.19 set up 0-dim parameters, such as CLIP's `logit_scale`.

    It broadcasts each parameter as bytes, and torch cannot view a 0-dimensional tensor as bytes. Ranks: all.
    """
    scalars: list[Any] = [parameter for parameter in module.parameters() if parameter.ndim == 0]
    broadcast_from_rank_zero(runtime.collective, scalars)
    for parameter in scalars:
        parameter.ds_optim_param = True  # excludes it from broadcasts at stages 1 and 2
        if stage == 3:
            parameter.data = parameter.data.view(1)
    try:
        yield
    finally:
        for parameter in scalars:
            del parameter.ds_optim_param
            if stage == 3:
                parameter.ds_shape = torch.Size(())
                if parameter.numel() == 1:  # DeepSpeed keeps small parameters whole
                    parameter.data = parameter.data.view(())


@contextmanager
def _wrapped_hidden(runtime: Runtime, module: nn.Module) -> Iterator[None]:
    """Broadcast frozen quantised parameters, and hide them from DeepSpeed, which broadcasts bytes. Ranks: all."""
    frozen = list(frozen_wrapped(module).values())
    broadcast_from_rank_zero(runtime.collective, frozen)
    hidden = [(part, name, each) for part in module.modules() for name, each in part._parameters.items()]
    hidden = [(part, name, each) for part, name, each in hidden if any(each is other for other in frozen)]
    for part, name, _ in hidden:
        part._parameters[name] = None
    try:
        yield
    finally:
        for part, name, parameter in hidden:
            part._parameters[name] = parameter


def _remember(objects: Iterable[Any]) -> Callable[[], None]:
    """Return a function that removes all attributes added to the objects after this call."""
    before = [(each, set(vars(each))) for each in objects]

    def forget() -> None:
        for each, names in before:
            for name in set(vars(each)) - names:
                del each.__dict__[name]

    return forget


def _refuse_setup(runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], *, stage: int) -> None:
    """Raise ValueError if an engine would ignore a request."""
    name = type(module).__name__
    if stage == 3 and uncompiled(module) is not module:
        raise ValueError(_COMPILED)
    if stage == 3 and isinstance(module, AveragedModel):
        raise ValueError(_AVERAGED)
    first = next(iter(module.named_parameters()), None)
    if stage == 3 and first is not None and not first[1].is_floating_point():
        raise ValueError(_NOT_FLOATING.format(name=name, first=first[0], dtype=first[1].dtype))
    dtypes = {parameter.dtype: each for each, parameter in module.named_parameters() if parameter.requires_grad}
    if len(dtypes) > 1 or any(dtype.is_complex for dtype in dtypes):
        found = ", ".join(f"{dtype} ({each!r})" for dtype, each in dtypes.items())
        raise ValueError(
            f"`{name}` has trained parameters of {found}, and ZeRO copies all of them into flat tensors of one real "
            "dtype. Convert them before `fabric.setup`, or pass `strategy='ddp'`."
        )
    refuse_sparse_layers("deepspeed", module)
    if stage == 3:
        refuse_wrapped_in_flat(module, "deepspeed_stage_3")
    if len(optimizers) > 1:
        raise ValueError(f"`setup` was given {len(optimizers)} optimizers for `{name}`, and {_ONE_OPTIMIZER}")
    for optimizer in optimizers:
        own = {id(parameter) for parameter in module.parameters()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise ValueError(
                f"The `{type(optimizer).__name__}` holds {len(foreign)} parameters (the first of shape "
                f"{tuple(foreign[0].shape)}) that `{name}` does not have. Make it from `model.parameters()` of the "
                "model that is passed to `setup`, after anything that replaces them."
            )
        if not any(map(is_trained, optimizer.param_groups)):
            raise ValueError(
                f"The `{type(optimizer).__name__}` holds no parameter that requires a gradient, and an engine of "
                "DeepSpeed needs one. Unfreeze parameters before `fabric.setup`, or leave the optimizer out."
            )
        if isinstance(optimizer, Adagrad):
            raise ValueError(_REPLACED)
        if has_modes(optimizer):
            raise ValueError(MODES.format(optimizer=type(optimizer).__name__))
        if type(optimizer).__name__ != "MuonWithAuxAdam" or type(optimizer).__module__.split(".")[0] != "deepspeed":
            refuse_dependent([optimizer], _DEPENDENT, flat=True)


_COMPILED = (
    "`setup(torch.compile(model))` at ZeRO stage 3: DeepSpeed's hooks gather the weights around each submodule, but a "
    "compiled model does not run them. Compile what `setup` returns, or use stage 2."
)
_LATER = (
    "`setup_optimizers` under `strategy='deepspeed'`: DeepSpeed sets up a model and its optimizer together. Call "
    "`fabric.setup(model, optimizer)`."
)
_ONE_OPTIMIZER = (
    "a DeepSpeed engine has one. Make one optimizer with several parameter groups, or set up each part of the model "
    "with its own."
)
_REPLACED = (
    "`Adagrad` in `setup`: DeepSpeed replaces it by another object, which `optimizer.step()` and learning-rate "
    "schedulers would not reach. Use Adam, AdamW, RMSprop or SGD."
)
_DEPENDENT = (
    "`{optimizer}` in `setup` uses whole tensors, but ZeRO passes an optimizer slices of one flat tensor, so the "
    "results would differ. Use one that updates each element independently (SGD, Adam, "
    "AdamW, RMSprop), DeepSpeed's own `MuonWithAuxAdam`, or `strategy='ddp'` or 'fsdp'."
)
_IN_SHARDS = (
    "Stage 3 shards the parameters of a prepared module, so it cannot be copied or pickled on one rank. Copy the "
    "module before it is set up; `fabric.save` and `fabric.load` transfer weights from one to the other. For an "
    "average of weights write `fabric.ema(model)`; for a target network that is updated in every step, pass "
    "`strategy='deepspeed_stage_2'` or 'fsdp'."
)
_AVERAGED = (
    "An `AveragedModel` at ZeRO stage 3, where weights are empty tensors between forwards: `update_parameters` would "
    "copy nothing. Write `average = fabric.ema(model)`, or pass `strategy='deepspeed_stage_2'` or 'fsdp'; to evaluate "
    "averages that were loaded, set up `averaged.module`."
)
_NOT_FLOATING = (
    "`{name}`'s first parameter, `{first}`, is {dtype}, but DeepSpeed's stage 3 takes its own dtype from there. Store "
    "quantised weights as a floating-point dtype (`quant_storage=torch.bfloat16` of bitsandbytes), or pass "
    "`strategy='fsdp'`."
)
_NO_OPTIMIZER = (
    "`{name}` was set up without an optimizer, for evaluation: under `strategy='deepspeed'` no engine would reduce its "
    "gradients. Call `fabric.setup(model, optimizer)`."
)


@contextmanager
def _own_hooks(module: nn.Module, *, are_copied: bool) -> Iterator[None]:
    """Turn the forward hooks that a backend registers within the context into `Hook`s.

    `are_copied`: False for a module that cannot be copied: it is enough that its hooks are never compiled.
    """
    before = {key for hooks in hooks_of(module) for key in hooks}  # torch numbers hooks of all modules
    yield
    own: Callable[[Callable[..., Any]], Callable[..., Any]] = Hook if are_copied else disable_dynamo
    for hooks in hooks_of(module):
        hooks.update({key: own(hook) for key, hook in hooks.items() if key not in before})
