"""Loss scaling for float16: small gradients do not vanish, and a step whose gradients overflowed is skipped.

The optimizer stays the user's own: a hook on its `step` hides the gradients of a step that must be skipped, so that
weights, momentum and step counts do not change. Gradients are scaled only while a backward runs, and between backwards
that are not synchronised: clipping by whatever function, several optimizers after one backward, and gradients from an
earlier backward all give the numbers of a run without scaling (scales are powers of two, hence exact).
Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; growth and backoff as in torch.amp.GradScaler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.undo import undo_all

_GROWTH, _BACKOFF = 2.0, 0.5


@dataclass(slots=True)
class _Gradients:
    """The state of one optimizer's gradients."""

    scale: float = 1.0  # the factor that is in them at present
    is_checked: bool = True  # whether they were unscaled and checked since the last backward; a scale may be 1.0
    overflowed: bool = False
    hidden: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@final
class LossScaler:
    """Multiplies losses by a scale, and divides gradients by it; the scale adapts.

    For strategies whose ranks hold different gradients, `decide` returns whether any rank's gradients overflowed, and
    `local` returns this rank's part of a gradient. `report` is called with a message for each skipped step.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_interval_steps: int = 2000,
        decide: Callable[[bool], bool] = bool,
        local: Callable[[Tensor], Tensor] | None = None,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.scale = init_scale
        self.growth_interval_steps = growth_interval_steps
        self.num_skipped = 0
        self._decide = decide
        self._local = local
        self._report = report
        self._good_steps = 0
        self._stepped = False
        self._overflowed = False
        self._known: WeakKeyDictionary[Optimizer, _Gradients] = WeakKeyDictionary()

    def attach(self, optimizer: Optimizer) -> Callable[[], None]:
        """Make `optimizer.step()` unscale its gradients, or skip; `optimizer.step_was_skipped` shows which it did.

        Returns a function that removes the hooks.
        """
        self._known[optimizer] = _Gradients()
        return undo_all(
            (hook_steps(optimizer, self._before_step, self._after_step), partial(self._known.pop, optimizer, None))
        )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on. Existing gradients are brought to the same scale."""
        self._adapt()
        for optimizer, gradients in self._known.items():
            self._rescale(optimizer, gradients, self.scale)
            gradients.is_checked = False
        return loss * self.scale

    def finish_backward(self) -> None:
        """Divide all gradients by their scale, so that the program sees the gradients of a run without scaling.

        Overflow is checked when they are clipped, or in the step: see `unscale`.
        """
        for optimizer, gradients in self._known.items():
            self._rescale(optimizer, gradients, 1.0)

    def unscale(self, *optimizers: Optimizer, is_finite: bool = False) -> bool:
        """Unscale the gradients of optimizers; returns whether they are finite. Calling it again does nothing.

        If the gradients of one are not, all skip their steps. `is_finite`: whether they are known to be, on all ranks;
        otherwise it waits for the device.
        """
        overflowed = False
        for optimizer in optimizers:
            gradients = self._known[optimizer]
            if not gradients.is_checked:
                gradients.is_checked = True
                self._rescale(optimizer, gradients, 1.0)
                gradients.overflowed = not is_finite and self._decide(not all_finite(self._gradients_of(optimizer)))
            overflowed |= gradients.overflowed
        for optimizer in optimizers:
            self._known[optimizer].overflowed = overflowed
        return not overflowed

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run."""
        self._adapt()
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])

    def _adapt(self) -> None:
        """Grow or back off, once per round of steps. Called at the next backward, because all optimizers share the
        round."""
        if not self._stepped:
            return
        self._good_steps = 0 if self._overflowed else self._good_steps + 1
        if self._overflowed:
            self.scale *= _BACKOFF
        elif self._good_steps == self.growth_interval_steps:
            self.scale *= _GROWTH
            self._good_steps = 0
        self._stepped = self._overflowed = False

    def _rescale(self, optimizer: Optimizer, gradients: _Gradients, scale: float) -> None:
        if gradients.scale != scale:
            present = self._gradients_of(optimizer)
            if present:
                torch._foreach_mul_(present, scale / gradients.scale)
            gradients.scale = scale

    def _gradients_of(self, optimizer: Optimizer) -> list[Tensor]:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return gradients if self._local is None else [self._local(gradient) for gradient in gradients]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise RuntimeError(
                f"`{type(optimizer).__name__}.step(closure)` under a precision that scales losses: the closure "
                "computes gradients of its own, which would not be divided by the loss scale. Call `step()` without a "
                "closure, or choose `precision='bf16-mixed'` or `'32-true'`, which need no scaling."
            )
        gradients = self._known[optimizer]
        if not self.unscale(optimizer):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            gradients.hidden = [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients = self._known[optimizer]
        for parameter, gradient in gradients.hidden:
            parameter.grad = gradient
        gradients.hidden = []
        self._stepped = True
        optimizer.step_was_skipped = gradients.overflowed  # type: ignore[attr-defined]
        if gradients.overflowed:
            self._overflowed = True
            self.num_skipped += 1
            gradients.overflowed = False
            self._report(
                f"Skipped a step of {type(optimizer).__name__}: its gradients overflowed at a loss scale of "
                f"{self.scale:g}. The next scale is {self.scale * _BACKOFF:g}."
            )


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether all numbers of these tensors, this rank's parts of gradients, are finite."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    held = [gradient.detach() for gradient in dense if gradient.numel()]
    # On a CPU the 2-norm takes a fifteenth of the time of the maximum. It may overflow where no gradient does.
    if torch.nn.utils.get_total_norm(held, 2.0).isfinite():
        return True
    # One transfer for all takes 0.16 of the time of one for each tensor.
    return bool(torch.nn.utils.get_total_norm(held, float("inf")).isfinite())
