"""The sanitizer: in the steps that it watches, everything that ranks should agree on is compared, exactly.

    Fabric(sanitize="start")   steps 1 to 3, then 4, 8, 16, ... (the default)
    Fabric(sanitize="always")  every step
    Fabric(sanitize=100)       those of "start", and every hundredth
    Fabric(sanitize=False)     none

A step is counted by its synchronised backward, which every rank runs, even a rank that skips the optimizer's step. The
count starts at 1 again when an optimizer is set up. A watch is attached from the end of the backward before a watched
step to the end of the next one, and compares after each backward: one all-reduce of seven numbers (`agreement.py`).
Values are gathered only to write the error. In other steps nothing is attached: `fabric.backward` compares two
integers.

Knows no strategy: `Layout` and `StateAccess` tell which ranks hold the same part of a tensor.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric.checks.agreement import Fact, SanitizerError, Value, compare
from fabric.checks.check import Check, Moments, StepCounter
from fabric.checks.forward_weights import WatchedModel
from fabric.checks.training_state import gradients_of, modes_of, names_in, options_of, weights_and_states
from fabric.checks.unprepared_optimizers import UnpreparedOptimizers
from fabric.strategies.accelerators.accelerator_registry import device_rngs
from fabric.strategies.checkpoint.state import StateAccess
from fabric.strategies.collectives.torch_calls_check import compare_collectives
from fabric.strategies.data.rng import digest, torch_rng
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.step_hooks import is_base_step
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
        """The first watched step after this one."""
        return next((each for each in range(number + 1, 2 * number + 5) if each in self), sys.maxsize)


@final
class Sanitizer(Check):
    """Tells the watch which objects were set up, and starts it. Always called; the watch is called in watched steps."""

    def __init__(self, watch: "Watch") -> None:
        self._watch = watch

    def connected(self, runtime: Runtime) -> None:
        if self._watch.watched.sanitize == "always":
            self._watch.begin()
            self._watch.compare_collectives()

    def model_set_up(self, model: Prepared) -> None:
        if model.layout.weights != "any":
            self._watch.add_model(model)

    def optimizers_set_up(self, optimizers: Mapping[Optimizer, StateAccess]) -> None:
        self._watch.add_optimizers(optimizers)

    def loader_set_up(self, loader: Iterable[Any], is_split: bool) -> None:
        self._watch.reads_same_data |= not is_split


@final
class Watch(Check):
    """Compares after each synchronised backward, while it is attached.

    `steps`: the counters of all prepared optimizers; `access_of`: the access to the state of one; `unprepared`: what is
    known of other optimizers.
    """

    def __init__(
        self,
        runtime: Runtime,
        sanitize: Sanitize,
        moments: Moments,
        steps: Mapping[Optimizer, StepCounter],
        access_of: Callable[[Optimizer], StateAccess],
        unprepared: UnpreparedOptimizers,
    ) -> None:
        self.watched, self._moments, self._steps, self._runtime = WatchedSteps(sanitize), moments, steps, runtime
        self._access_of, self._unprepared = access_of, unprepared
        self._everyone = tuple(range(runtime.world.size))
        self._has_models, self._num_added = False, 0
        self._objects: WeakValueDictionary[int, WatchedModel | Optimizer] = WeakValueDictionary()
        """What was set up and still exists on this rank, by its number, the same on all ranks."""
        self._compared: set[int] = set()
        """The numbers of what is compared: see `_forget_gone`."""
        self.reads_same_data = runtime.share.count != runtime.world.size
        self._attached = ExitStack()
        """Undoes what was attached."""
        self._compares_collectives = False
        self._first = 0
        """Synchronised backwards before the step that counts as 1."""
        self._stepped: dict[Optimizer, int] = {}
        """The number of steps of each optimizer that has stepped since the last comparison. This keeps the optimizers
        and their models alive until the comparison, also if the program drops them before `fabric.close()`."""
        self._held: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
        """The ids of the parameters with which an optimizer was set up. Parameters that are added later, and are in no
        model, may not be averaged."""
        self._known: WeakSet[Optimizer] = WeakSet()
        """Optimizers of an earlier comparison, which may have states."""
        self._noted: dict[Fact, Value] = {}
        """Gradients before a step since the last comparison."""
        self._equal_after = ""
        self._has_raised = False
        self._is_counted_here = False
        """Whether the present step is counted by itself, not by a backward."""
        self._batches = ""
        """A digest of the batches since the last backward."""
        self._equal_data: set[str] | None = set()
        """The batches or losses that were the same on all ranks. None: some differed."""
        self._generators: list[str] = []
        """Digests of the states of torch's generators at the last comparison."""
        self._has_told_of_draws = False

    def add_model(self, model: Prepared) -> None:
        """Compare this model from now on."""
        watched = WatchedModel(model)
        model.path.kept.append(watched)
        self._has_models = True
        self._add(watched)

    def add_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Compare the options and states of these optimizers from now on, and count steps from 1."""
        for optimizer in optimizers:
            self._held[optimizer] = set(map(id, parameters_of(optimizer)))
            self._add(optimizer)
        if self._has_models:
            self._first = self._moments.num_backwards
            self.begin()

    def _add(self, obj: WatchedModel | Optimizer) -> None:
        self._num_added += 1
        self._objects[self._num_added] = obj
        self._compared.add(self._num_added)

    def _models(self) -> list[WatchedModel]:
        return [each for each in self._objects.values() if isinstance(each, WatchedModel)]

    def _forget_gone(self) -> None:
        """Compare only the objects that exist on all ranks: garbage is collected at different times. Ranks: all."""
        of_ranks = self._runtime.collective.all_gather_object(set(self._objects))
        self._compared.intersection_update(*of_ranks)

    def begin(self) -> None:
        """Watch the next step."""
        self._moments.due_at, self._moments.due = sys.maxsize, self.begin
        for each in self._models():
            each.attach()
        if self not in self._moments.checks:
            self._attached.callback(register_optimizer_step_pre_hook(self._stepping).remove)
            self._moments.add(self)

    def _end_if_over(self) -> None:
        """End the watch, and plan the next one, if neither the step of the last backward nor the next is watched."""
        number = self._moments.num_backwards - self._first
        if number not in self.watched and number + 1 not in self.watched:
            self._moments.due_at = self._first + self.watched.after(number) - 1
            self._moments.remove(self)

    def removed(self) -> None:
        self._attached.close()
        self._compares_collectives = False
        for each in self._models():
            each.remove()

    def compare_collectives(self) -> None:
        """Compare each collective before it runs, until the watch is detached."""
        if self._runtime.collective.process_group is not None and not self._compares_collectives:
            self._compares_collectives = True
            self._attached.enter_context(compare_collectives(self._runtime.collective.progress))

    def batch_received(self, batch: Any, source: object) -> None:
        if tensors := tensors_in(batch):
            self._batches += f"{digest_of_all(tensors)} "

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self._unprepared.before_backward()
        self.compare_collectives()

    def after_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self._unprepared.after_backward()
        if is_synchronised:
            data, self._batches = self._batches or float(loss.detach().sum()).hex(), ""
            is_same_data, is_same_draw = self._compare(data, with_modes=True)
            self._judge(is_same_data, is_same_draw, data)
            self._end_if_over()

    def gradients_averaged(self, parameters: Iterable[Tensor]) -> None:
        self._unprepared.averaged.update(map(id, parameters))

    def after_step(self, optimizer: Optimizer) -> None:
        self._stepped[optimizer] = self._steps[optimizer].num_steps
        if self._is_counted_here:  # not in `_stepping`: torch iterates over the hooks that this may remove
            self._is_counted_here = False
            self._end_if_over()

    def before_setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._stepped.clear()  # otherwise a model that was trained would live on beside this one

    def closing(self) -> None:
        if not self._has_raised:  # the program has caught it
            self._compare(is_at_end=True)

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before the hooks of the optimizer, which may remove gradients that other ranks own."""
        if is_base_step(optimizer):
            return
        if self._moments.is_in_backward:
            for each in self._models():
                if not each.prepared.layout.averages_before_hooks and each.prepared.holds(optimizer):
                    raise SanitizerError(_WITHIN.format(optimizer=type(optimizer).__name__))
        if optimizer not in self._held:
            self._unprepared.step(optimizer)
            return
        if optimizer in self._stepped:  # no synchronised `fabric.backward` since its last step
            self._moments.num_backwards += 1
            self._compare()
            self._is_counted_here = True
        prepared = [each.prepared for each in self._models()]
        # Those of which every rank has the averaged gradients of all weights.
        models = [each for each in prepared if each.layout.gradients == "replicas" and each.holds(optimizer)]
        names = names_in(models or prepared)
        among = {id(each) for each in parameters_of(optimizer)}
        if not models:
            among -= self._held[optimizer] | names.keys()
        self._noted.update(gradients_of(optimizer, names, self._everyone, among))

    def _compare(self, data: str = "", *, with_modes: bool = False, is_at_end: bool = False) -> tuple[bool, bool]:
        """See `agreement.compare`. Raises: SanitizerError, on every rank. Ranks: all."""
        if not self._has_models:
            return False, False
        stepped, self._stepped = self._stepped, {}
        noted, self._noted = self._noted, {}
        when = ", ".join(f"step {number} of `{type(optimizer).__name__}`" for optimizer, number in stepped.items())
        when = f"after {when}" if when else "at `fabric.close()`" if is_at_end else "in a backward"
        since = f"They were equal {self._equal_after}." if self._equal_after else "It is the first comparison."
        self._has_raised, drawn, collective = True, self._drawn(), self._runtime.collective
        found = None
        while found is None:
            facts, are_gone = self._facts(noted, with_modes=with_modes)
            found = compare(collective, facts, data, drawn, when, since, are_gone=are_gone)
            if found is None:
                self._forget_gone()
        self._known.update(self._held)
        self._has_raised, self._equal_after = False, when
        if not is_at_end and self._moments.num_backwards - self._first in self.watched:
            for moment in self._moments.compared:
                moment()
        return found

    def _facts(self, noted: Mapping[Fact, Value], *, with_modes: bool) -> tuple[dict[Fact, Value], bool]:
        """The facts of this rank, and whether an object that is compared no longer exists on it."""
        compared = {number: each for number, each in self._objects.items() if number in self._compared}
        models = [each for each in compared.values() if isinstance(each, WatchedModel)]
        optimizers = [each for each in compared.values() if isinstance(each, Optimizer)]
        facts: dict[Fact, Value] = {}
        for optimizer in optimizers:  # first, for gradients that some ranks do not step with differ, too
            facts |= options_of(optimizer, self._steps[optimizer].num_steps, self._everyone)
        facts |= noted
        if with_modes:
            facts |= modes_of((each.prepared.module for each in models), self._everyone)
        stateful = {
            optimizer: self._access_of(optimizer)
            for optimizer in optimizers
            if optimizer in self._known and self._held[optimizer].issuperset(map(id, parameters_of(optimizer)))
        }
        facts |= weights_and_states([(each.prepared, each.parameters) for each in models], stateful, self._runtime)
        return facts, len(compared) < len(self._compared)

    def _drawn(self) -> str:
        """The states of torch's generators that have changed since the last comparison; this rank if none has."""
        rngs = [torch_rng(), *device_rngs(self._runtime.devices)]
        before, self._generators = self._generators, [digest(rng.read()).hex() for rng in rngs]
        drawn = [now for now, then in zip(self._generators, before, strict=False) if now != then]
        return "".join(drawn) or str(self._runtime.world.rank)

    def _judge(self, is_same_data: bool, is_same_draw: bool, data: str) -> None:
        """Report, once, that ranks read the same data, or draw the same random numbers for different data."""
        if self.reads_same_data:
            return
        if is_same_draw and not is_same_data and not self._has_told_of_draws:
            self._has_told_of_draws = True
            self._runtime.report(_SAME_DRAWS.format(size=len(self._everyone)))
        if not is_same_data:
            self._equal_data = None
        elif self._equal_data is not None:
            self._equal_data.add(data)
            if len(self._equal_data) == _NUM_STEPS:  # a constant says nothing about the data
                self._runtime.report(_SAME_DATA.format(size=len(self._everyone)))
                self._equal_data = None


_WITHIN = (
    "`{optimizer}.step()` within a backward, in a hook of a parameter: its gradient is averaged over the ranks later. "
    "Step after `fabric.backward(loss)`; or pass `strategy='fsdp'`, where such hooks get averaged gradients."
)
_NUM_STEPS = 3  # a head that starts from zeros gives one loss for all data, but not after a step
_SAME_DRAWS = (
    "All {size} ranks draw the same random numbers for different data: torch's generators are seeded alike, so "
    "dropout and noise are the same on all ranks. If that is not meant, seed each rank differently after "
    "`fabric.setup`: `torch.manual_seed(seed + fabric.global_rank)`. This is reported once."
)
_SAME_DATA = (
    "In their first steps all {size} ranks had the same batches or losses, to the last bit: they read the same "
    "samples, unless the loss is one over the samples of all ranks. Pass the loader to `fabric.setup_dataloaders`, and "
    "iterate what it returns. Where the same data is meant for all ranks, `fabric.setup_dataloaders(loader, "
    "use_distributed_sampler=False)` says so."
)
