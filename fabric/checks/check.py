"""`Check`: the role of everything that watches a training loop, and the moments at which it is called.

A check overrides the moments that it needs. `Moments` collects the overridden methods once: a moment that no check
overrides costs no call.
Arithmetic (weights, loss scaling, gradient synchronisation) is no check.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import StateAccess
from fabric.strategies.data.loop_progress import LoopProgress
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.step_hooks import hook_steps


class Check:
    """Watches the loop of one `Fabric`: `Fabric(plugins=[MyCheck()])`.

        class LossIsPositive(Check):
            def before_backward(self, loss, is_synchronised):
                if loss.item() < 0:
                    raise ValueError(f"the loss is {loss.item()}")

    Moments are called on every rank. What a moment raises, the line of the program that led to it raises.
    """

    checkpoint_folder: str | None = None
    """Where `fabric.save` writes instead, and `fabric.load` then reads: a program runs for its numbers alone."""

    def connected(self, runtime: Runtime) -> None:
        """This process is a rank now."""

    def before_setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """`fabric.setup` is called, before the strategy sees the model."""

    def model_set_up(self, model: Prepared) -> None:
        """A model was set up."""

    def optimizers_set_up(self, optimizers: Mapping[Optimizer, StateAccess]) -> None:
        """Optimizers were set up, each with the access to its state; after `model_set_up` of a model set up with
        them."""

    def loader_set_up(self, loader: Iterable[Any], is_split: bool) -> None:
        """A loader was set up. `is_split`: whether each rank reads a share of it."""

    def batch_received(self, batch: Any, source: object) -> None:
        """The loop receives a batch of a prepared loader, or a micro-batch of a window."""

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        """`fabric.backward` is called. `is_synchronised`: whether it synchronises gradients."""

    def after_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        """`fabric.backward` has computed gradients."""

    def gradients_averaged(self, parameters: Iterable[Tensor]) -> None:
        """`fabric.average_gradients` has averaged the gradients of these."""

    def compared(self) -> None:
        """The sanitizer has compared the ranks, before the step that it watches."""

    def before_step(self, optimizer: Optimizer) -> None:
        """A prepared optimizer is about to step with the gradients that it has now."""

    def after_step(self, optimizer: Optimizer) -> None:
        """A prepared optimizer has stepped. `optimizer.step_was_skipped`: whether it changed nothing."""

    def saving(self) -> None:
        """`fabric.save` is called."""

    def saved(self, path: str, is_blocking: bool) -> None:
        """`fabric.save` returns. `is_blocking`: whether the checkpoint is complete."""

    def loaded(self) -> None:
        """A checkpoint was loaded, by all ranks together."""

    def closing(self) -> None:
        """`fabric.close` was called, and no exception has ended the loop."""

    def removed(self) -> None:
        """The check was removed: restore what it has changed."""


@final
class Moments:
    """The checks of one session. By the name of each moment, the methods of the checks that override it."""

    def __init__(self, progress: LoopProgress) -> None:
        self.progress = progress
        """Calls `batch_received`, while a check overrides it."""
        self.is_in_backward = False
        """Whether `fabric.backward` runs at present."""
        self.num_backwards = 0
        """Synchronised backwards of the loop, which all ranks run alike."""
        self.due_at = sys.maxsize
        """The number of synchronised backwards after which `due` is called."""
        self.due: Callable[[], None] = lambda: None
        self._collect(())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., None], ...]: ...

    def add(self, *checks: Check) -> None:
        """Call these checks from now on, after the present ones."""
        self._collect((*self.checks, *checks))

    def remove(self, check: Check) -> None:
        """Stop calling this check."""
        self._collect(tuple(each for each in self.checks if each is not check))
        check.removed()

    def _collect(self, checks: tuple[Check, ...]) -> None:
        self.checks = checks
        for name in MOMENTS:
            overriding = (each for each in checks if getattr(type(each), name) is not getattr(Check, name))
            setattr(self, name, tuple(getattr(each, name) for each in overriding))
        several = self._receive if self.batch_received else None
        self.progress.note_batch = self.batch_received[0] if len(self.batch_received) == 1 else several

    def _receive(self, batch: Any, source: object) -> None:
        for moment in self.batch_received:
            moment(batch, source)

    def clear(self) -> None:
        """Stop calling all checks."""
        checks = self.checks
        self._collect(())
        for check in checks:
            check.removed()

    def stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook of an optimizer's step, where a check overrides `before_step`."""
        for moment in self.before_step:
            moment(optimizer)


MOMENTS = tuple(name for name, each in vars(Check).items() if callable(each) and name[0] != "_" and name != "removed")


@final
class StepCounter:
    """The number of steps of one optimizer, without those that were skipped (`optimizer.step_was_skipped`)."""

    def __init__(self) -> None:
        self.num_steps = 0

    def attach(self, optimizer: Optimizer, loaders: LoopProgress, moments: Moments) -> Callable[[], None]:
        """Count from now on, for `loaders` too, and call `after_step` of the checks. Returns a function to stop."""

        def count(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not stepped.step_was_skipped:  # type: ignore[attr-defined]  # every optimizer that was set up has it
                self.num_steps += 1
            loaders.num_steps += 1
            for moment in moments.after_step:
                moment(stepped)

        return hook_steps(optimizer, after=count)

    def state_dict(self) -> dict[str, Any]:
        """The number, to be saved."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved number."""
        self.num_steps = state_dict["num_steps"]
