"""The sanitizer: in the steps that it watches, everything that ranks should agree on is compared, exactly.

    Fabric(sanitize="start")   steps 1 to 3, then 4, 8, 16, ... (the default)
    Fabric(sanitize="always")  every step
    Fabric(sanitize=100)       those of "start", and every hundredth
    Fabric(sanitize=False)     none

Steps are counted by their synchronised backward, which all ranks run, also one that leaves a step of its optimizer out;
from 1 again where an optimizer is set up. A watch is attached from the end of the backward before a watched step to the
end of the next one, and compares after each backward: one all-reduce of seven numbers (`agreement.py`). What ranks have
is gathered only to write the error. In other steps nothing is attached: `fabric.backward` compares two integers.

Knows what was set up, and no strategy: which ranks hold the same part of a tensor, the strategy's `StateAccess` knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fabric.checks.agreement import Fact, Losses, SanitizerError, Value, compare
from fabric.checks.check import Check, Moments
from fabric.checks.facts import Parameters, gradients_of, names_in, options_of, weights_and_states
from fabric.checks.forward_weights import ForwardWeights, is_compiled
from fabric.checks.steps import StepCounter
from fabric.checks.unaveraged import UnaveragedOptimizers
from fabric.loop.seed import device_rngs
from fabric.strategies.checkpoint.state import StateAccess
from fabric.strategies.collectives.comparing import compare_collectives
from fabric.strategies.data.rng import digest, torch_rng
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.digest import digest_of_all
from fabric.strategies.tensors.nests import tensors_in
from fabric.strategies.tensors.parameters import parameters_of

Sanitize: TypeAlias = Literal["start", "always", False] | int


@final
@dataclass(frozen=True, slots=True)
class WatchedSteps:
    """Which steps of an optimizer are watched, counted from 1."""

    sanitize: Sanitize

    def __contains__(self, number: int) -> bool:
        if self.sanitize is False or self.sanitize == "always":
            return self.sanitize == "always"
        is_start = number <= 3 or number & (number - 1) == 0
        return is_start or (self.sanitize != "start" and number % self.sanitize == 0)

    def after(self, number: int) -> int:
        """The first that comes after this one."""
        return next((each for each in range(number + 1, 2 * number + 5) if each in self), sys.maxsize)


@final
class Sanitizer(Check):
    """Attaches the watch to the steps that are watched.

    `steps`: the counters of all prepared optimizers; `models`: all that are set up. `is_comparable(model)`: whether all
    ranks set it up, and call `fabric.backward` together. `has_whole_gradients(model)`: whether every rank has the
    averaged gradients of all of the model when its optimizer steps. `sees_collectives`: whether they are those of
    torch.distributed.
    """

    def __init__(
        self,
        sanitize: Sanitize,
        moments: Moments,
        steps: Mapping[Optimizer, StepCounter],
        models: Iterable[Prepared],
        *,
        is_comparable: Callable[[Prepared], bool],
        has_whole_gradients: Callable[[Prepared], bool],
        sees_collectives: bool,
    ) -> None:
        self._watched, self._moments, self._steps, self._models = WatchedSteps(sanitize), moments, steps, models
        self._is_comparable = is_comparable
        self._has_whole_gradients, self._sees_collectives = has_whole_gradients, sees_collectives
        self._watch: _Watch | None = None
        self._unaveraged: UnaveragedOptimizers | None = None
        self._first = 0
        """Synchronised backwards before the step that counts as 1."""

    def connected(self, runtime: Runtime) -> None:
        self._watch = _Watch(runtime, self._moments, self._steps, self._sees_collectives, self._end_if_over)
        self._moments.due = self._begin
        if self._sees_collectives:
            self._unaveraged = UnaveragedOptimizers(runtime, self._steps, self._models)
        if self._watched.sanitize == "always":
            self._begin()
            self.watch.compare_collectives()

    def model_set_up(self, model: Prepared) -> None:
        if self._is_comparable(model):
            self.watch.add_model(model, has_whole_gradients=self._has_whole_gradients(model))

    def optimizers_set_up(self, optimizers: Mapping[Optimizer, StateAccess]) -> None:
        self.watch.add_optimizers(optimizers)
        if self.watch.has_models:
            self._first = self._moments.num_backwards
            self._begin()

    def loader_set_up(self, loader: Iterable[Any], is_split: bool) -> None:
        if not is_split:
            self.watch.reads_same_data = True

    @property
    def watch(self) -> _Watch:
        """The check that is attached in watched steps."""
        assert self._watch is not None, "connected"
        return self._watch

    def _begin(self) -> None:
        self._moments.due_at = sys.maxsize
        if self.watch not in self._moments.checks:
            self.watch.attach()
            self._moments.add(self.watch)
            if self._unaveraged is not None:
                self._unaveraged.attach()
                self._moments.add(self._unaveraged)

    def _end(self) -> None:
        self._moments.remove(self.watch)
        if self._unaveraged is not None:
            self._moments.remove(self._unaveraged)

    def _end_if_over(self) -> None:
        """End the watch, and plan the next one, if neither the step of the last backward nor the next is watched."""
        number = self._moments.num_backwards - self._first
        if number not in self._watched and number + 1 not in self._watched:
            self._moments.due_at = self._first + self._watched.after(number) - 1
            self._end()


@final
class _Watch(Check):
    """Compares after each synchronised backward, while it is attached. `end_if_over`: detaches it after the last step
    that is watched."""

    def __init__(
        self,
        runtime: Runtime,
        moments: Moments,
        steps: Mapping[Optimizer, StepCounter],
        sees_collectives: bool,
        end_if_over: Callable[[], None],
    ) -> None:
        self._runtime, self._moments, self._steps, self._end_if_over = runtime, moments, steps, end_if_over
        self._sees_collectives = sees_collectives
        self._everyone = tuple(range(runtime.world.size))
        self._models: list[tuple[Prepared, Parameters]] = []
        """Each with its parameters as they were set up."""
        self._whole: list[Prepared] = []
        """Those of which each rank has all gradients."""
        self._forward_weights: list[ForwardWeights] = []
        self._access: dict[Optimizer, StateAccess] = {}
        self.reads_same_data = runtime.share.count != runtime.world.size
        self._collectives: ExitStack | None = None
        self._hook: RemovableHandle | None = None
        self._stepped: dict[Optimizer, int] = {}
        """Optimizers that have stepped since the last comparison, and how many steps each has taken."""
        self._held: dict[Optimizer, set[int]] = {}
        """The ids of the parameters with which an optimizer was set up. Those of no model, added later, may not be
        averaged."""
        self._known: set[Optimizer] = set()
        """Optimizers that were there at an earlier comparison, and so may have states."""
        self._gradients: dict[Fact, Value] = {}
        self._equal_after = ""
        self._has_raised = False
        self._is_counted_here = False
        """Whether the present step is counted by itself, not by a backward."""
        self._batches = ""
        """A digest of the batches since the last backward."""
        self._equal_data: set[str] | None = set()
        """What was the same on all ranks, of batches or losses. None: once something was not."""
        self._generators: list[str] = []
        """Digests of the states of torch's generators at the last comparison."""
        self._has_told_of_draws = False

    @property
    def has_models(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self._models)

    def add_model(self, model: Prepared, *, has_whole_gradients: bool) -> None:
        """Compare this model, too."""
        self._models.append((model, dict(model.module.named_parameters(remove_duplicate=False))))
        if has_whole_gradients:
            self._whole.append(model)
        self._forward_weights.append(ForwardWeights(model.module))

    def add_optimizers(self, optimizers: Mapping[Optimizer, StateAccess]) -> None:
        """Compare their options and states, too."""
        self._access.update(optimizers)
        self._held.update({each: set(map(id, parameters_of(each))) for each in optimizers})

    def attach(self) -> None:
        """Look at the steps of all optimizers, also of those that were not set up."""
        self._hook = register_optimizer_step_pre_hook(self._stepping)

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self.compare_collectives()
        if not is_compiled(loss):
            for each in self._forward_weights:
                each.attach()

    def compare_collectives(self) -> None:
        """Compare each collective before it runs, until the watch is detached."""
        if self._sees_collectives and self._collectives is None:
            self._collectives = ExitStack()
            self._collectives.enter_context(compare_collectives())

    def batch_received(self, batch: Any, source: object) -> None:
        if tensors := tensors_in(batch):
            self._batches += f"{digest_of_all(tensors)} "

    def after_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        if is_synchronised:
            number = float(loss.detach().sum())
            data, self._batches = self._batches or number.hex(), ""
            self._judge(self._compare(number, data), data)
            self._end_if_over()

    def after_step(self, optimizer: Optimizer) -> None:
        self._stepped[optimizer] = self._steps[optimizer].num_steps
        if self._is_counted_here:  # not in `_stepping`: torch iterates over the hooks that this may remove
            self._is_counted_here = False
            self._end_if_over()

    def closing(self) -> None:
        if not self._has_raised:  # the program has caught it
            self._compare()

    def removed(self) -> None:
        if self._collectives is not None:
            self._collectives.close()
            self._collectives = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for each in self._forward_weights:
            each.remove()

    def _refuse_replaced(self, optimizer: Optimizer) -> None:
        """Raise SanitizerError if a parameter is another object than that which the strategy has sharded."""
        for model, before in self._models:
            if any(model is each for each in self._whole) or not model.holds(optimizer):
                continue
            now = dict(model.module.named_parameters(remove_duplicate=False))
            names = [name for name, parameter in before.items() if now.get(name, parameter) is not parameter]
            if names:
                raise SanitizerError(
                    _REPLACED.format(model=type(model.module).__name__, names=", ".join(map(repr, names[:5])))
                )

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before the hooks of the optimizer, which may remove gradients that other ranks own."""
        if self._runtime.backward.is_running:
            self._refuse_within_backward(optimizer)
        if optimizer not in self._access:
            return
        if optimizer in self._stepped:  # no synchronised `fabric.backward` since its last step
            self._moments.num_backwards += 1
            self._compare()
            self._is_counted_here = True
        self._refuse_replaced(optimizer)
        models = [model for model in self._whole if model.holds(optimizer)]
        names = names_in(models or (model for model, _ in self._models))
        if models:
            self._gradients.update(gradients_of(optimizer, names, self._everyone))
        elif added := {id(each) for each in parameters_of(optimizer)} - self._held[optimizer] - names.keys():
            self._gradients.update(gradients_of(optimizer, names, self._everyone, added))

    def _refuse_within_backward(self, optimizer: Optimizer) -> None:
        """Raise SanitizerError if gradients are averaged after the optimizer has stepped with them."""
        for model, _ in self._models:
            if not model.sync.averages_before_hooks and model.holds(optimizer):
                raise SanitizerError(
                    _WITHIN.format(optimizer=type(optimizer).__name__, model=type(model.module).__name__)
                )

    def _compare(self, loss: float = 0.0, data: str = "") -> Losses:
        """Raises: SanitizerError, on every rank. Ranks: all."""
        if not self._models:
            return Losses(is_same_data=False, is_same_draw=False, num_nonfinite=0)
        stepped, self._stepped = self._stepped, {}
        facts: dict[Fact, Value] = {}
        for optimizer in self._access:
            facts |= options_of(optimizer, self._steps[optimizer].num_steps, self._everyone)
        facts |= self._gradients
        self._gradients = {}
        stateful = {
            optimizer: access
            for optimizer, access in self._access.items()
            if optimizer in self._known and self._held[optimizer].issuperset(map(id, parameters_of(optimizer)))
        }
        facts |= weights_and_states(self._models, stateful, len(self._everyone))
        self._known.update(self._access)
        when = ", ".join(f"step {number} of `{type(optimizer).__name__}`" for optimizer, number in stepped.items())
        when = f"after {when}" if when else "in a backward" if self._equal_after else "in a first backward"
        since = f"They were equal {self._equal_after}." if self._equal_after else "It is the first comparison."
        self._has_raised = True
        losses = compare(self._runtime.collective, facts, loss, data, self._drawn(), when, since)
        self._has_raised = False
        self._equal_after = when
        return losses

    def _drawn(self) -> str:
        """The states of torch's generators that have changed since the last comparison; if none has, this rank."""
        rngs = [torch_rng(), *device_rngs(self._runtime.devices)]
        before, self._generators = self._generators, [digest(rng.read()).hex() for rng in rngs]
        drawn = [now for now, then in zip(self._generators, before, strict=False) if now != then]
        return "".join(drawn) or str(self._runtime.world.rank)

    def _judge(self, losses: Losses, data: str) -> None:
        """Report losses that are not finite, and ranks that should read different data, or draw other numbers for it,
        and do not."""
        if losses.num_nonfinite:
            self._runtime.report(_NOT_FINITE.format(number=losses.num_nonfinite, size=len(self._everyone)))
        if self.reads_same_data:
            return
        if losses.is_same_draw and not losses.is_same_data and not self._has_told_of_draws:
            self._has_told_of_draws = True
            self._runtime.report(_SAME_DRAWS.format(size=len(self._everyone)))
        if self._equal_data is None:
            return
        if not losses.is_same_data:
            self._equal_data = None
            return
        self._equal_data.add(data)
        if len(self._equal_data) == _NUM_STEPS:  # a constant says nothing about the data
            self._runtime.report(_SAME_DATA.format(size=len(self._everyone)))
            self._equal_data = None


_WITHIN = (
    "`{optimizer}.step()` within a backward, in a hook of a parameter of `{model}`: its gradient is averaged over the "
    "ranks later, so replicas would drift apart. Step after `fabric.backward(loss)`; or pass `strategy='fsdp'`, where "
    "a hook on a parameter gets averaged gradients."
)
_REPLACED = (
    "Parameters of `{model}` were replaced after `fabric.setup`, and the strategy trains those that it has sharded: "
    "{names}. Replace and parametrize before `setup`, or change the values in place: `parameter.copy_(...)`."
)
_NUM_STEPS = 3  # a head that starts from zeros gives one loss for all data, but not after a step
_NOT_FINITE = "The loss is not finite on {number} of {size} ranks."
_SAME_DRAWS = (
    "All {size} ranks draw the same random numbers for different data: torch's generators were seeded alike after "
    "`fabric.setup`, so dropout and noise are the same on all ranks. If that is not meant, seed each rank differently: "
    "`torch.manual_seed(seed + fabric.global_rank)`. This is reported once."
)
_SAME_DATA = (
    "In their first steps all {size} ranks had the same batches or losses, to the last bit: they read the same "
    "samples. Pass the loader to `fabric.setup_dataloaders`, and iterate what it returns. Where the same data is meant "
    "for all ranks, `fabric.setup_dataloaders(loader, use_distributed_sampler=False)` says so."
)
