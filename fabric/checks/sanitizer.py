"""The sanitizer: in the steps that it watches, everything that ranks should agree on is compared, exactly.

    Fabric(sanitize="start")   steps 1 to 3 of each optimizer, then 4, 8, 16, ... (the default)
    Fabric(sanitize="always")  every step
    Fabric(sanitize=100)       those of "start", and every hundredth
    Fabric(sanitize=False)     none

A step is compared when the ranks meet next: after the next synchronised backward, or in `fabric.close`. A rank that
left a step out comes there, too, so that it is found and not waited for. One all-reduce of five numbers compares
everything (`agreement.py`); the ranks gather what they have only to write the error. In steps that are not watched
nothing is attached: a counted step compares two integers.

Knows what was set up, and no strategy: which ranks hold the same part of a tensor, the strategy's `StateAccess` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer

from fabric.checks.agreement import Fact, Losses, Value, compare
from fabric.checks.check import Check, Moments
from fabric.checks.facts import gradients_of, names_in, options_of, weights_and_states
from fabric.checks.steps import StepCounter
from fabric.strategies.checkpoint.state import StateAccess
from fabric.strategies.collectives.debug import compare_collectives
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime

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
        return next(each for each in range(number + 1, 2 * number + 5) if each in self)


@final
class Sanitizer(Check):
    """Plans which steps are watched, and attaches the watch to them.

    `steps`: the counters of all prepared optimizers. `has_whole_gradients(model)`: whether every rank has the averaged
    gradients of all of the model when its optimizer steps. `sees_collectives`: whether they are torch.distributed's.
    """

    def __init__(
        self,
        sanitize: Sanitize,
        moments: Moments,
        steps: Mapping[Optimizer, StepCounter],
        has_whole_gradients: Callable[[Prepared], bool],
        sees_collectives: bool,
    ) -> None:
        self._watched, self._moments, self._steps = WatchedSteps(sanitize), moments, steps
        self._has_whole_gradients, self._sees_collectives = has_whole_gradients, sees_collectives
        self._watch: _Watch | None = None

    def connected(self, runtime: Runtime) -> None:
        self._watch = _Watch(runtime, self._steps, self._sees_collectives, self._end)

    def model_set_up(self, model: Prepared) -> None:
        self.watch.add_model(model, has_whole_gradients=self._has_whole_gradients(model))
        self._begin()

    def optimizers_set_up(self, optimizers: Mapping[Optimizer, StateAccess]) -> None:
        self.watch.access.update(optimizers)
        for optimizer in optimizers:
            self._plan(optimizer)

    def loader_set_up(self, loader: Iterable[Any], is_split: bool) -> None:
        if not is_split:
            self.watch.reads_same_data = True

    def loading(self) -> None:
        self.watch.is_due = True

    def closing(self) -> None:
        self.watch.finish()

    @property
    def watch(self) -> _Watch:
        """The check that is attached in watched steps."""
        assert self._watch is not None, "connected"
        return self._watch

    def _plan(self, optimizer: Optimizer) -> None:
        """Watch the next step if it is one of those; be called again before the next watched one."""
        counter = self._steps[optimizer]
        following = self._watched.after(counter.num_steps)
        counter.due, counter.due_at = self._plan, max(following - 1, counter.num_steps + 1)
        if following == counter.num_steps + 1:
            self.watch.coming.add(optimizer)
            self._begin()

    def _begin(self) -> None:
        if self.watch not in self._moments.checks:
            self.watch.is_due = True
            self._moments.add(self.watch)

    def _end(self) -> None:
        self._moments.remove(self.watch)


@final
class _Watch(Check):
    """Compares one step after the other, while it is attached. `end`: detaches it."""

    def __init__(
        self,
        runtime: Runtime,
        steps: Mapping[Optimizer, StepCounter],
        sees_collectives: bool,
        end: Callable[[], None],
    ) -> None:
        self._runtime, self._steps, self._end = runtime, steps, end
        self._sees_collectives = sees_collectives
        self._everyone = tuple(range(runtime.world.size))
        self._models: list[Prepared] = []
        self._whole: list[Prepared] = []
        self.access: dict[Optimizer, StateAccess] = {}
        self.coming: set[Optimizer] = set()
        """Optimizers whose next step is watched."""
        self.reads_same_data = runtime.share.count != runtime.world.size
        self.is_due = False
        """Whether something has happened that was not compared."""
        self._collectives = ExitStack()
        self._is_comparing_collectives = False
        self._stepped: dict[Optimizer, int] = {}
        """Optimizers that have stepped since the last comparison, and how many steps each has taken."""
        self._gradients: dict[Fact, Value] = {}
        self._has_met = False
        """Whether a synchronised backward has ended since the last step."""
        self._equal_after = ""
        self._loss = 0.0
        self._equal_losses: set[float] | None = set()

    def add_model(self, model: Prepared, *, has_whole_gradients: bool) -> None:
        """Compare this model, too."""
        self._models.append(model)
        if has_whole_gradients:
            self._whole.append(model)

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        if self._sees_collectives and not self._is_comparing_collectives:
            self._collectives.enter_context(compare_collectives())
            self._is_comparing_collectives = True

    def after_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        if not is_synchronised:
            return
        self._has_met = True
        if self.is_due:
            self._loss = float(loss.detach().sum())
            self._compare()

    def before_step(self, optimizer: Optimizer) -> None:
        if self.is_due and self._stepped and not self._has_met:  # the loop calls no `fabric.backward`
            self._compare()
        models = [model for model in self._whole if model.holds(optimizer)]
        if optimizer in self.coming and models:
            self._gradients.update(gradients_of(optimizer, names_in(models), self._everyone))

    def after_step(self, optimizer: Optimizer) -> None:
        self._has_met, self.is_due = False, True
        self._stepped[optimizer] = self._steps[optimizer].num_steps
        self.coming.discard(optimizer)

    def finish(self) -> None:
        """Compare what has not been compared. Ranks: all."""
        if self.is_due:
            self._compare()
        self._leave()

    def _compare(self) -> None:
        """Raises: RanksDifferError, on every rank. Ranks: all."""
        stepped, self._stepped, self.is_due = self._stepped, {}, False
        gradients, self._gradients = self._gradients, {}
        facts = dict(
            fact
            for optimizer in self.access
            for fact in options_of(optimizer, self._steps[optimizer].num_steps, self._everyone).items()
        )
        facts |= gradients | weights_and_states(self._models, self.access, len(self._everyone))
        when = ", ".join(f"step {number} of `{type(optimizer).__name__}`" for optimizer, number in stepped.items())
        since = f"They were equal {self._equal_after}." if self._equal_after else "It is the first comparison."
        losses = compare(
            self._runtime.collective, facts, self._loss, f"After {when}" if when else "Before a first step", since
        )
        self._equal_after = f"after {when}" if when else "before the first step"
        self._judge(losses)
        if stepped and not self.coming.intersection(stepped):
            self._leave()

    def _leave(self) -> None:
        self._collectives.close()
        self._is_comparing_collectives = False
        self._end()

    def _judge(self, losses: Losses) -> None:
        """Report losses that are not finite, and equal losses of ranks that read different data."""
        if losses.num_nonfinite:
            self._runtime.report(_NOT_FINITE.format(number=losses.num_nonfinite, size=len(self._everyone)))
        if self._equal_losses is None or self.reads_same_data:
            return
        if not losses.are_equal:
            self._equal_losses = None
            return
        self._equal_losses.add(self._loss)
        if len(self._equal_losses) == _NUM_LOSSES:  # a constant says nothing about the data
            self._runtime.report(_SAME_DATA.format(size=len(self._everyone)))
            self._equal_losses = None


_NUM_LOSSES = 3  # a head that starts from zeros gives one loss for all data, but not after a step
_NOT_FINITE = "The loss is not finite on {number} of {size} ranks."
_SAME_DATA = (
    "In their first steps all {size} ranks had the same loss, to the last bit: they read the same samples. Pass the "
    "loader to `fabric.setup_dataloaders`, and iterate what it returns. Where the same data is meant for all ranks, "
    "`fabric.setup_dataloaders(loader, use_distributed_sampler=False)` says so."
)
