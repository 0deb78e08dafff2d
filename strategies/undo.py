"""Functions that undo something, combined into one; attributes that are restored; and hooks that do not outlive their
parameter."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import proxy

from torch.utils.hooks import RemovableHandle


def undo_all(actions: Iterable[Callable[[], object]]) -> Callable[[], None]:
    """A function that calls all actions, in order."""
    actions = tuple(actions)

    def undo() -> None:
        for action in actions:
            action()

    return undo


def replace_attributes(obj: object, **values: object) -> Callable[[], None]:
    """Set attributes of the instance, past `__setattr__` of its class. Returns a function that undoes it."""
    before = {name: vars(obj)[name] for name in values if name in vars(obj)}
    vars(obj).update(values)

    def undo() -> None:
        for name in values:
            vars(obj).pop(name, None)
        vars(obj).update(before)

    return undo


def hold_weakly(handle: RemovableHandle) -> Callable[..., Any]:
    """Hold the hook of a gradient weakly from now on. Returns the hook, which is run as long as the caller keeps it.

    Python's garbage collector does not see what holds a hook of `register_post_accumulate_grad_hook`, or of a node of
    the graph: a hook that refers to its parameter would keep the whole model alive for ever (torch 2.14).
    """
    hooks: Any = handle.hooks_dict_ref()
    hook: Callable[..., Any] = hooks[handle.id]
    hooks[handle.id] = proxy(hook, lambda _: handle.remove())
    return hook
