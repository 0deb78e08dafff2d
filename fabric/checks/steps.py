"""Counts the steps of one optimizer; the number is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.optim import Optimizer

from fabric.checks.check import Moments
from fabric.strategies.data.loop_progress import LoopProgress


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

        return optimizer.register_step_post_hook(count).remove

    def state_dict(self) -> dict[str, Any]:
        """The number, to be saved."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved number."""
        self.num_steps = state_dict["num_steps"]
