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
    both = (optimizer.register_step_pre_hook, before), (optimizer.register_step_post_hook, after)
    handles = [register(_once_a_step(optimizer, hook)) for register, hook in both if hook is not None]
    for handle in handles if is_first else ():
        hooks: Any = handle.hooks_dict_ref()
        hooks.move_to_end(handle.id, last=False)
    return undo_all(handle.remove for handle in handles)


def is_base_step(optimizer: Optimizer) -> bool:
    """Whether the hook that asks is called by `super().step()`, within the step of a class derived from an optimizer's.

    torch wraps the `step` of each class of which an instance was created, so it calls the hooks in both (torch 2.14).
    """
    return _derives_its_step(optimizer) and len(_calls_of_step(optimizer)) > 1


def _once_a_step(optimizer: Optimizer, hook: Hook) -> Hook:
    if not _derives_its_step(optimizer):
        return hook
    return wraps(hook)(lambda *step: None if is_base_step(optimizer) else hook(*step))


def _derives_its_step(optimizer: Optimizer) -> bool:
    return sum("step" in vars(each) for each in type(optimizer).__mro__) > 2  # `Optimizer` has one


def _calls_of_step(optimizer: Optimizer) -> list[Any]:
    """The frames of torch's wrapper around a step of this optimizer, from the caller outwards."""
    wrapper, frame, found = type(optimizer).step.__code__, sys._getframe(), []
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is wrapper and any(value is optimizer for value in frame.f_locals.values()):
            found.append(frame)
    return found
