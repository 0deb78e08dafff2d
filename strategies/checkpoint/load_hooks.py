"""Hooks that observe a module's `load_state_dict`, and change nothing that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn


class KeepsNamesAndShapes:
    """A hook of this package, after which a state has the names and shapes that it had."""


@final
class LoadObserver(KeepsNamesAndShapes):
    """A hook on the user's module; in a copy of the module, and in a pickle, it does nothing."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def __call__(self, *args: Any) -> None:
        self._notify()

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle, ()


def _idle() -> LoadObserver:
    return LoadObserver(_nothing)


def _nothing() -> None:
    pass


def observe_loads(module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call `before` and `after` around each `load_state_dict` of the module. Returns a function that removes them."""
    handles = [
        module.register_load_state_dict_pre_hook(LoadObserver(before)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(LoadObserver(after)),  # type: ignore[no-untyped-call]
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def has_converting_hook(module: nn.Module) -> bool:
    """Whether the module itself has a hook that may change the names or shapes of a state before it is loaded. Ours do
    not, nor do those of torch's sharding, which restore the shards."""
    hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    return any(
        not isinstance(hook, KeepsNamesAndShapes)
        and not getattr(hook, "__module__", "").startswith("torch.distributed.")
        for hook in hooks
    )
