"""Which parts of a model an option is for: named by their classes, or chosen by a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from torch import Tensor, nn

Policy: TypeAlias = type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool]
"""A class, several classes, or a function that is true of the modules meant."""


SMALL_BYTES = 2**28
"""Below this many bytes of parameters (256 MiB) it does not matter whether a model is gathered all at once."""


def check_policy(policy: Policy | None, option: str) -> None:
    """Raise TypeError where the policy is of another kind. `option`: what the user calls it."""
    if isinstance(policy, Collection) and not isinstance(policy, (str, nn.Module)):
        strangers = [each for each in policy if not isinstance(each, type)]
        if strangers:
            raise TypeError(f"`{option}` has {strangers[0]!r}, which is no class. Name classes of modules.")
    elif isinstance(policy, nn.Module):
        raise TypeError(
            f"`{option}` is a module, a `{type(policy).__name__}`. Pass its class, or a function of a module that "
            "gives a bool."
        )
    elif policy is not None and not callable(policy):
        raise TypeError(
            f"`{option}={policy!r}` says no parts. Pass classes of modules, or a function of a module that gives a "
            "bool."
        )


def matching(module: nn.Module, policy: Policy | None, option: str) -> list[nn.Module]:
    """The parts of `module`, itself included, that the policy means, outer before inner. None means no part.

    Raises: ValueError: there is none. TypeError: the policy is of another kind.
    """
    if policy is None:
        return []
    check_policy(policy, option)
    chosen = [part for part in module.modules() if _means(policy, part)]
    if not chosen:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"`{option}={_words(policy)}` matches no part of the `{type(module).__name__}`, which is made of "
            f"{', '.join(classes)}. Name some of these classes, or leave the option out."
        )
    return chosen


def whole_at_once(module: nn.Module) -> str | None:
    """What to tell who gathers a model all at once. None: it is small."""
    size = _bytes(module.parameters())
    if size < SMALL_BYTES:
        return None
    said = (
        f"`{type(module).__name__}` has {size / 2**30:.1f} GiB of parameters, and `strategy='fsdp'` without "
        "`auto_wrap_policy` gathers all of them at once on every rank, which saves no memory in forward."
    )
    block = _largest_repeated(module)
    if block is None:
        return f"{said} Name the classes of its largest parts: `FSDPStrategy(auto_wrap_policy={{...}})`."
    kind, count = block
    name = f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__
    return (
        f"{said} It has {count} parts of class `{name}`: write `FSDPStrategy(auto_wrap_policy={{{name}}})` to gather "
        "one of them at a time."
    )


def _largest_repeated(module: nn.Module) -> tuple[type[nn.Module], int] | None:
    """The class of which one module has several children, whichever have most in them, and how many."""
    best: tuple[int, type[nn.Module], int] | None = None
    for part in module.modules():
        for kind in {type(child) for child in part.children()} - {nn.ModuleList, nn.ModuleDict}:
            alike = [child for child in part.children() if type(child) is kind]
            size = _bytes(parameter for child in alike for parameter in child.parameters())
            if len(alike) > 1 and size and (best is None or size > best[0]):
                best = size, kind, len(alike)
    return None if best is None else best[1:]


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _means(policy: Policy, part: nn.Module) -> bool:
    if isinstance(policy, type):
        return isinstance(part, policy)
    return isinstance(part, tuple(policy)) if isinstance(policy, Collection) else bool(policy(part))


def _words(policy: Policy) -> str:
    if isinstance(policy, type):
        return policy.__name__
    if isinstance(policy, Collection):
        return "{" + ", ".join(sorted(each.__name__ for each in policy)) + "}"
    return getattr(policy, "__qualname__", repr(policy))
