"""What `Fabric.setup` and `setup_optimizers` do before and after the strategy does, and the objects that were set up.

The strategy distributes a model; here it is checked before, and what every strategy needs is attached afterwards: the
averaging of parameters that are in no module, the counting of steps, the moments of the checks. Exists while a fabric
is connected; everything that it attaches to objects that still exist is undone when the fabric is closed.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.checks.check import Moments, StepCounter
from fabric.checks.unprepared_optimizers import UnpreparedOptimizers
from fabric.loop.accumulation import Accumulation
from fabric.loop.weighting import Weighting, average_closure_loss
from fabric.strategies.accelerators.accelerator_registry import make_accelerator
from fabric.strategies.checkpoint.direct_state_dict import refuse_whole_states, report_shards
from fabric.strategies.checkpoint.state import PLAIN, StateAccess, Stateful
from fabric.strategies.gradients.bare_parameters import BareParameters, in_no_module, refuse_another_model
from fabric.strategies.gradients.clipping import gradients_are_finite
from fabric.strategies.module.activation_checkpointing import recompute
from fabric.strategies.module.initialization import initialize_empty
from fabric.strategies.module.model_checks import refuse_different_models
from fabric.strategies.optimizers.owners import needs_owners
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Layout, Runtime
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.strategy import Strategy
from fabric.strategies.tensors.dtensor import user_class
from fabric.strategies.tensors.parameters import parameters_of, uncompiled

if TYPE_CHECKING:
    from fabric.strategies.data.device_loader import DeviceLoader


@final
@dataclass(eq=False)
class _OfOptimizer:
    """The objects that an optimizer keeps alive."""

    access: StateAccess
    models: Sequence[Prepared]
    """The models of its parameters: between a forward and its backward the program may keep the optimizer alone."""
    attached: ExitStack
    """Undoes what was attached to it, and to those that were set up with it."""


@final
class SetUp:
    """The objects of one fabric that were set up, by what `setup` returned. The program alone keeps them alive: see
    Note [What was set up lives as long as the program has it]."""

    def __init__(
        self, runtime: Runtime, strategy: Strategy, moments: Moments, accumulation: Accumulation, weighting: Weighting
    ) -> None:
        self.runtime, self._strategy, self._moments = runtime, strategy, moments
        self.accumulation, self.weighting = accumulation, weighting
        self._numbers = count()
        self._models: WeakValueDictionary[int, Prepared] = WeakValueDictionary()
        self.optimizers: WeakKeyDictionary[Optimizer, StepCounter] = WeakKeyDictionary()
        """Each with the number of its steps."""
        self.schedulers: list[ref[Stateful]] = []
        self.loaders: list[ref[DeviceLoader]] = []
        self.counters: list[StepCounter] = []
        """The counters of all optimizers, including those that no longer exist: ranks drop them at different times."""
        self._attached: WeakValueDictionary[int, ExitStack] = WeakValueDictionary()
        """Undoes what was attached to a model or an optimizer, which keeps it alive."""
        self.bare = BareParameters(runtime)
        """Parameters that are in no module."""
        self.unprepared = UnpreparedOptimizers(runtime, self.optimizers, self._living)

    @property
    def models(self) -> dict[nn.Module, Prepared]:
        """The models that the program has, in the order in which they were set up."""
        return {each.module: each for each in self._models.values()}

    @property
    def layout(self) -> Layout:
        """The strategy's layout; a model's forward may communicate, too, where the user's function decides."""
        layouts = (self.runtime.layout, *(each.layout for each in self._living()))
        return replace(layouts[0], forward_communicates=any(each.forward_communicates for each in layouts))

    @property
    def num_steps(self) -> int:
        """The steps of the optimizer that has stepped most."""
        return max((each.num_steps for each in self.counters), default=0)

    @property
    def strategy_name(self) -> str:
        """The class of the strategy."""
        return type(self._strategy).__name__

    def _living(self) -> list[Prepared]:
        return list(self._models.values())

    def detach(self) -> None:
        """Undo what was attached to the models and optimizers that the program has."""
        with ExitStack() as attached:  # the last first, and each of them whatever another raises
            for each in list(self._attached.values()):
                attached.push(each)

    def forget(self) -> None:
        """Drop all references to the objects that were set up."""
        for known in (self._models, self.optimizers, self.schedulers, self.loaders, self.counters):
            known.clear()  # others have them too
        self.bare.release()
        self.bare = BareParameters(self.runtime)
        self.unprepared.release()
        self.unprepared = UnpreparedOptimizers(self.runtime, self.optimizers, self._living)

    def model(self, module: nn.Module, optimizers: Sequence[Optimizer], *, move: bool) -> Prepared:
        """Set up a model and its optimizers. Ranks: all. Raises: as `Fabric.setup`."""
        runtime, strategy = self.runtime, self._strategy
        self._refuse_twice(module, *optimizers)
        for moment in self._moments.before_setup:
            moment(module, optimizers)
        if self._models:
            gc.collect()  # those that the program has let go of are in reference cycles, such as those of DDP
        bare = self._in_no_module(optimizers, module)
        self._refuse_shared(uncompiled(module))
        if runtime.collective.size > 1 or runtime.collective.process_group is not None:
            _refuse_sync_batch_norm(module, make_accelerator(runtime.device.type).why_no_sync_batch_norm)
        initialize_empty(module)
        if runtime.layout.weights != "any":
            refuse_different_models(runtime, module, fills_from_rank_zero=strategy.fills_from_rank_zero)
        with ExitStack() as stack:  # restores the module if the strategy raises
            stack.callback(recompute(uncompiled(module), strategy.activation_checkpointing_policy))
            if strategy.activation_offload is not None:
                from fabric.strategies.module.activation_offload import offload

                stack.callback(offload(uncompiled(module), strategy.activation_offload))
            before = list(uncompiled(module).parameters())
            prepared = strategy.setup(runtime, module, optimizers, move)
            attached = stack.pop_all()
        attached.callback(prepared.release)
        model = replace(prepared, optimizers=WeakSet(prepared.optimizers), release_optimizers=lambda: None)
        prepared.path.kept += [model, attached]
        self._attached[next(self._numbers)] = attached
        why = None if prepared.scale_loss is not None or runtime.loss_scaler is None else _SCALED
        if runtime.world.size > 1 and (lack := strategy.lacks.get("later_optimizers")) is not None:
            why = f"each rank would step with its own gradients, which are not averaged. {lack}"
        self.unprepared.add(uncompiled(prepared.module), before, why)
        attached.callback(report_shards(uncompiled(prepared.module), prepared.state, runtime.report))
        self._models[next(self._numbers)] = model
        for added in self._moments.model_set_up:
            added(model)
        runtime.divergence.compare(runtime.share, runtime.collective.size, runtime.collective.start_add_numbers)
        self._add(dict.fromkeys(optimizers, model.state), bare, [model], prepared.release_optimizers, move)
        return prepared

    def later_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Set up optimizers of models that were set up before. Raises: as `Fabric.setup_optimizers`."""
        self._refuse_twice(*optimizers)
        bare = self._in_no_module(optimizers)
        undo = self._strategy.setup_optimizers(self.runtime, optimizers)
        models = [*self.models.values()]
        shared = next((model.state for model in models), PLAIN)  # for parameters outside of any module
        access = {each: self.state_access(each, otherwise=shared) for each in optimizers}
        self._add(access, bare, [each for each in models if any(map(each.holds, optimizers))], undo)

    def add_loaders(self, loaders: Sequence[Iterable[Any]], *, is_split: bool) -> None:
        """Add loaders that the strategy has prepared. `is_split`: whether each rank reads a share of them."""
        from fabric.strategies.data.device_loader import DeviceLoader  # which was imported, if there are loaders

        self.loaders += [ref(each) for each in loaders if isinstance(each, DeviceLoader)]
        for moment in self._moments.loader_set_up:
            for each in loaders:
                moment(each, is_split)

    def refuse_averaged(self, parameters: Sequence[Tensor]) -> None:
        """Raise ValueError if `fabric.backward` averages the gradients of one of these parameters."""
        for model in self.models.values():
            known = {*model.module.parameters(), *model.sync.parameters_held()}
            if any(parameter in known for parameter in parameters):
                raise ValueError(
                    f"`average_gradients` was given parameters of a `{type(model.module).__name__}` that was set up, "
                    "whose gradients `fabric.backward` averages. Call that; or leave the model out of `fabric.setup`, "
                    "and move it by `fabric.to_device(model)`."
                )

    def holds(self, obj: object) -> bool:
        """Whether the module, optimizer or loader was set up."""
        if isinstance(obj, nn.Module):
            return obj in self.models
        return obj in self.optimizers if isinstance(obj, Optimizer) else any(each() is obj for each in self.loaders)

    def prepared(self, module: nn.Module, method: str) -> Prepared:
        """The model that `method` was given. Raises: ValueError: it was not set up."""
        if module not in self.models:
            raise ValueError(
                f"`{method}` was given a `{type(module).__name__}` that this fabric has not set up. "
                "Pass what `fabric.setup` returned."
            )
        return self.models[module]

    def state_access(self, obj: nn.Module | Optimizer, otherwise: StateAccess = PLAIN) -> StateAccess:
        """How the state of a module or an optimizer is read and written."""
        known: _OfOptimizer | None = vars(obj).get("_set_up") if obj in self.optimizers else None
        if known is not None:
            return known.access
        return next((model.state for model in self.models.values() if model.holds(obj)), otherwise)

    def clipped_together(self, model: Prepared, given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
        """The optimizers whose gradients are clipped. Raises ValueError: see `Fabric.clip_gradients`."""
        known, first = self.optimizers, given if isinstance(given, Optimizer) else None
        chosen = [given] if isinstance(given, Optimizer) else list(known if given is None else given)
        if len(known) > 1 or len(self.models) > 1:
            own = set(model.sync.parameters_held())
            held = {each: own.intersection(parameters_of(each)) for each in known}
            if given is None:
                chosen = [each for each in known if held[each] or each in model.optimizers]
            rest = set[Tensor]().union(*held.values()).difference(parameters_of(first) if first else ())
            if (
                first is not None
                and first in known
                and rest
                and (held[first] or self._model_of(first) not in (None, model))
            ):
                name = user_class(model.module).__name__
                raise ValueError(_OF_A_PART.format(model=name, optimizer=type(first).__name__, count=len(rest)))
        if not chosen or any(each not in known for each in chosen):
            raise ValueError("`clip_gradients` was given an optimizer that was not set up. Pass it to `fabric.setup`.")
        return chosen

    def scalers(self) -> list[Stateful]:
        """The loss scalers: those of engines, or that of the precision."""
        if len(self.models) > 1:
            gc.collect()
        own = [model.loss_scale for model in self.models.values() if model.loss_scale is not None]
        shared = self.runtime.loss_scaler
        return [*own] if own or shared is None else [shared]

    def gradients_are_finite(self, optimizer: Optimizer) -> bool:
        """Whether all gradients of an optimizer are finite on all ranks. Ranks: all call it."""
        model, runtime = self._model_of(optimizer), self.runtime
        if model is not None:
            return model.is_finite(optimizer)
        return gradients_are_finite(optimizer, scaler=runtime.loss_scaler, any_rank=runtime.any_rank)

    def scaler_of(self, optimizer: Optimizer) -> Stateful | None:
        """The loss scaler of the gradients with which an optimizer steps."""
        model = self._model_of(optimizer)
        return self.runtime.loss_scaler if model is None or model.scale_loss is None else model.loss_scale

    def _model_of(self, optimizer: Optimizer) -> Prepared | None:
        # An engine gives its optimizer other tensors than the parameters.
        models = (each for each in self.models.values() if optimizer in each.optimizers or each.holds(optimizer))
        return next(models, None)

    def _refuse_twice(self, *objects: nn.Module | Optimizer) -> None:
        for obj in objects:
            if self.holds(obj):
                raise ValueError(
                    f"This `{type(obj).__name__}` was set up before. Set each module and optimizer up once, and use "
                    "what `setup` returned."
                )

    def _refuse_shared(self, module: nn.Module) -> None:
        """Raise ValueError for a parameter that another model has, too, where each model would shard it by itself."""
        others = [*self.models] if self.runtime.layout.forward_communicates else []
        known = {each: type(other).__name__ for other in others for each in other.parameters()}
        for name, each in module.named_parameters():
            other = known.get(each) or (self.unprepared.model_of(each) if each.requires_grad else None)
            if other is not None:
                raise ValueError(_SHARED.format(name=name, model=type(module).__name__, other=other))

    def _in_no_module(self, optimizers: Sequence[Optimizer], *coming: nn.Module) -> list[Tensor]:
        """The parameters that are in no module. Raises: ValueError: they cannot be averaged, or their module came
        late."""
        early = [each for module in coming for each in module.parameters() if each in self.bare]
        if early:
            raise ValueError(
                f"An optimizer that was set up before holds {len(early)} parameters of the "
                f"`{type(coming[0]).__name__}`, which were treated as parameters outside of any module. Set up every "
                "module before the optimizers of its parameters, or together with them."
            )
        self.unprepared.refuse_replaced(optimizers)
        bare = in_no_module(optimizers, (*self.models, *coming))
        for module in coming:
            refuse_another_model(module, optimizers, bare)
        lack = self._strategy.lacks.get("bare_parameters")
        if lack is not None and self.runtime.world.size == 1:
            return []
        if bare and lack is not None:
            optimizer, parameter = bare[0]
            raise ValueError(
                f"The `{type(optimizer).__name__}` holds {len(bare)} parameters (the first of shape "
                f"{tuple(parameter.shape)}) that belong to no module set up so far. {lack}"
            )
        return [parameter for _, parameter in bare]

    def _add(
        self,
        optimizers: dict[Optimizer, StateAccess],
        bare: Sequence[Tensor],
        models: Sequence[Prepared],
        release: Callable[[], None],
        move: bool = True,
    ) -> None:
        """Attach what every strategy needs in the steps of these optimizers; average `bare` after each backward.

        `release`: restores the optimizers of the strategy.
        """
        runtime, undo = self.runtime, ExitStack()
        undo.callback(release)
        self._attached[next(self._numbers)] = undo
        if bare:
            self.bare.add(bare, move=move)
        for optimizer, access in optimizers.items():
            vars(optimizer)["_set_up"] = _OfOptimizer(access, models, undo)
            undo.callback(vars(optimizer).pop, "_set_up", None)
            optimizer.step_was_skipped = False  # type: ignore[attr-defined]  # the loss scaler sets it
            undo.callback(vars(optimizer).pop, "step_was_skipped", None)
            undo.callback(average_closure_loss(optimizer, runtime.collective, self.weighting))
            if not needs_owners(optimizer):  # whose states are whole
                undo.callback(optimizer.register_load_state_dict_pre_hook(refuse_whole_states).remove)
            self.optimizers[optimizer] = counter = StepCounter()
            self.counters.append(counter)
            undo.callback(counter.attach(optimizer, runtime.loop_progress, self._moments))
            if self._moments.before_step:
                undo.callback(hook_steps(optimizer, self._moments.stepping))
        if self.accumulation.repeated is not None:
            self.accumulation.guard(optimizers)
        for moment in self._moments.optimizers_set_up:
            moment(optimizers)


_SCALED = (
    "`precision='16-mixed'` multiplies the loss by a scale, and divides the gradients of optimizers that were set up, "
    "alone. Write `model, optimizer = fabric.setup(model, optimizer)`, or `fabric.setup_optimizers(optimizer)`."
)
_OF_A_PART = (
    "`clip_gradients({model}, {optimizer})`: {count} parameters of `{model}` that other optimizers step would count in "
    "no norm, and not be clipped. To clip all gradients of the model by one norm, leave the optimizer out: "
    "`clip_gradients(model, max_norm=1.0)`. To clip those of this one alone, pass a list: `[optimizer]`."
)
_SHARED = (
    "{name!r} of `{model}` is also a parameter of `{other}`, which was set up before, and each would have its own "
    "shards. Set up one module that has both, or pass `strategy='ddp'`."
)


def _refuse_sync_batch_norm(module: nn.Module, why: str | None) -> None:
    if why is not None and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError(f"`{type(module).__name__}` has layers of `SyncBatchNorm`. {why}")
