"""Steps whose gradients are not finite: skipped on all ranks, or an error on all.

A step pre-hook of each optimizer decides. Ranks with the same averaged gradients decide alike without communication.
Ranks with shards use the norm of `clip_gradients` or the decision of the loss scaler, which are equal on all ranks;
without either they all-reduce one flag. Only a step that is not finite costs more: the ranks gather their losses.

# Note [What a loss scaler skips]
Under float16 a gradient may overflow because the loss scale is high. The scaler then skips the step and lowers the
scale, and the guard does nothing. At a scale of 1 or less the gradients themselves overflow.

Without a guard, `FinalWeights` reports weights that are not finite at the end.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.checks.check import Check, StepCounter
from fabric.strategies.checkpoint.state import Stateful
from fabric.strategies.precision.loss_scaler import all_finite
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.dtensor import local_part, user_class

OnNonfinite: TypeAlias = Literal["raise", "skip"]


class NonFiniteGradientsError(RuntimeError):
    """Gradients were not finite at a step. Raised on every rank, before weights and optimizer change."""


@final
class GradientGuard(Check):
    """The guard that `fabric.guard_gradients` installs.

    `is_finite`: whether all gradients of an optimizer are finite on all ranks; all ranks call it. `scaler_of`: the loss
    scaler of an optimizer's gradients.
    """

    def __init__(
        self,
        on_nonfinite: OnNonfinite,
        runtime: Runtime,
        is_finite: Callable[[Optimizer], bool],
        scaler_of: Callable[[Optimizer], Stateful | None],
    ) -> None:
        self._action, self._runtime = on_nonfinite, runtime
        self._is_finite, self._scaler_of = is_finite, scaler_of
        self._removes: list[Callable[[], None]] = []
        self._norms: dict[Optimizer, Tensor] = {}
        self._losses: list[Tensor] = []
        """The losses of the backward passes since the last step."""
        self._has_stepped = False
        self._skips: Optimizer | None = None
        self.num_steps = 0
        """Number of steps of all optimizers."""

    def optimizers_set_up(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            # Strategies' hooks remove gradients: of a step that overflowed, or of other ranks' parameters.
            self._removes.append(hook_steps(optimizer, self._before_step, self._after_step, is_first=True))

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        if self._has_stepped:
            self._losses.clear()
            self._has_stepped = False
        self._losses.append(loss.detach())
        self._norms.clear()

    def removed(self) -> None:
        for remove in self._removes:
            remove()

    def note_norm(self, optimizers: Iterable[Optimizer], norm: Tensor) -> None:
        """Called when clipping has computed the norm of the current gradients over all ranks."""
        self._norms.update(dict.fromkeys(optimizers, norm))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise RuntimeError(
                f"`{type(optimizer).__name__}.step(closure)` with `fabric.guard_gradients`: the closure computes "
                "gradients within the step, where they are not checked. Call `step()` without a closure."
            )
        self.num_steps += 1
        norm = self._norms.pop(optimizer, None)
        is_finite = self._is_finite(optimizer) if norm is None else bool(norm.isfinite())
        optimizer.step_was_skipped = False  # type: ignore[attr-defined]
        if not is_finite:
            scaler = self._scaler_of(optimizer)
            if scaler is None or scaler.state_dict()["scale"] <= 1:  # Note [What a loss scaler skips]
                self._refuse(optimizer)
        self._has_stepped = True

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._skips is optimizer:
            optimizer.step_was_skipped = True  # type: ignore[attr-defined]
            self._skips = None

    def _refuse(self, optimizer: Optimizer) -> None:
        """Raise, or remove the gradients so that the step changes nothing. Ranks: all call it."""
        name = type(optimizer).__name__
        found = f"the gradients of step {self.num_steps} (`{name}`) are not finite. {self._whose_loss()}"
        if self._action == "raise":
            raise NonFiniteGradientsError(
                f"`optimizer.step()`: {found} Weights and optimizer are as before the step. To skip such steps, write "
                '`fabric.guard_gradients("skip")`.'
            )
        self._runtime.report(f"Skipped a step: {found} Weights and optimizer are unchanged.")
        optimizer.zero_grad(set_to_none=True)
        self._skips = optimizer

    def _whose_loss(self) -> str:
        of_ranks = self._runtime.collective.all_gather_object(all(loss.isfinite().all() for loss in self._losses))
        bad = ", ".join(str(rank) for rank, are_finite in enumerate(of_ranks) if not are_finite)
        return f"The loss was not finite on ranks {bad}." if bad else "The losses were finite on every rank."


@final
class FinalWeights(Check):
    """Reports in `close` that weights are not finite: each rank reads its own, without communication.

    `steps`: the counters of all prepared optimizers; `models`: all models that are set up.
    """

    def __init__(self, steps: Mapping[Optimizer, StepCounter], models: Callable[[], Iterable[Prepared]]) -> None:
        self._steps, self._models = steps, models

    def connected(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def closing(self) -> None:
        for model in self._models() if any(each.num_steps for each in self._steps.values()) else ():
            if model.state.empties_parameters:
                continue
            held = [local_part(each) for each in model.sync.parameters_held() if each.requires_grad]
            if not all_finite([each for each in held if type(each) in (Tensor, nn.Parameter)]):
                self._runtime.report(_NOT_FINITE.format(model=user_class(model.module).__name__))


_NOT_FINITE = (
    "At the end of the run the weights of `{model}` are not finite. To stop at such a step, or skip it, call "
    '`fabric.guard_gradients("raise")` or `("skip")` before the loop.'
)
