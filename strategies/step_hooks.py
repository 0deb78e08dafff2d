"""Hooks on the steps of an optimizer, called once a step."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

from torch.optim import Optimizer

from fabric.strategies.undo import undo_all

Hook: TypeAlias = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def hook_steps(
    optimizer: Optimizer, before: Hook | None = None, after: Hook | None = None, *, is_first: bool = False
) -> Callable[[], None]:
    """Call `before` and `after` each step of the optimizer from now on. Returns a function that removes both.

    `is_first`: they are called before the hooks that the optimizer has.
    """
    handles = []
    if before is not None:
        handles.append(optimizer.register_step_pre_hook(_once_a_step(optimizer, before)))
        if is_first:
            optimizer._optimizer_step_pre_hooks.move_to_end(handles[-1].id, last=False)  # type: ignore[attr-defined]
    if after is not None:
        handles.append(optimizer.register_step_post_hook(_once_a_step(optimizer, after)))
        if is_first:
            optimizer._optimizer_step_post_hooks.move_to_end(handles[-1].id, last=False)  # type: ignore[attr-defined]
    return undo_all(handle.remove for handle in handles)


def is_base_step(optimizer: Optimizer) -> bool:
    """Whether the hook that asks is called by `super().step()`, within the step of a class derived from an optimizer's.

    torch wraps the `step` of each class of which an instance was created, so it calls the hooks in both (torch 2.14).
    """
    return len(_steps_defined(optimizer)) > 1 and len(_calls_of_step(optimizer)) > 1


def _once_a_step(optimizer: Optimizer, hook: Hook) -> Hook:
    if len(_steps_defined(optimizer)) == 1:
        return hook

    @wraps(hook)
    def outermost(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if is_base_step(optimizer) else hook(optimizer, args, kwargs)

    return outermost


def _steps_defined(optimizer: Optimizer) -> list[type]:
    return [each for each in type(optimizer).__mro__ if "step" in vars(each) and each is not Optimizer]


def _calls_of_step(optimizer: Optimizer) -> list[Any]:
    """The frames of torch's wrapper around a step of this optimizer, from the caller outwards."""
    wrapper, frame, found = type(optimizer).step.__code__, sys._getframe(), []
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is wrapper and any(value is optimizer for value in frame.f_locals.values()):
            found.append(frame)
    return found
