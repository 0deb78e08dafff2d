"""Which submodules an option applies to: named by their classes, or chosen by a function."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from torch import nn

Policy: TypeAlias = type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool]
"""A class, several classes, or a function that returns True for the modules that are selected."""


def check_policy(policy: Policy | None, option: str) -> None:
    """Raise TypeError if the policy has another type. `option`: its name in the error."""
    are_classes = isinstance(policy, Collection) and all(isinstance(each, type) for each in policy)
    is_function = callable(policy) and not isinstance(policy, nn.Module)
    if policy is not None and not are_classes and not is_function:
        raise TypeError(
            f"`{option}={policy!r}` selects no submodules. Pass classes of modules, or a function of a module that "
            "returns a bool."
        )


def matching(module: nn.Module, policy: Policy | None, option: str) -> list[nn.Module]:
    """The submodules of `module`, itself included, that the policy selects, outer before inner. None selects none.

    Raises: ValueError: it selects none. TypeError: the policy has another type.
    """
    if policy is None:
        return []
    check_policy(policy, option)
    chosen = [part for part in module.modules() if _selects(policy, part)]
    if not chosen:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"`{option}={_words(policy)}` matches no submodule of the `{type(module).__name__}`, which has the classes "
            f"{', '.join(classes)}. Name some of these classes, or leave the option out."
        )
    return chosen


def _selects(policy: Policy, part: nn.Module) -> bool:
    if isinstance(policy, type):
        return isinstance(part, policy)
    return isinstance(part, tuple(policy)) if isinstance(policy, Collection) else bool(policy(part))


def _words(policy: Policy) -> str:
    if isinstance(policy, type):
        return policy.__name__
    if isinstance(policy, Collection):
        return "{" + ", ".join(sorted(each.__name__ for each in policy)) + "}"
    return getattr(policy, "__qualname__", repr(policy))
