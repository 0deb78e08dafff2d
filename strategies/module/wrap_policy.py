"""Which submodules an option applies to: named by their classes, or chosen by a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from torch import Tensor, nn

Policy: TypeAlias = type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool]
"""A class, several classes, or a function that returns True for the modules that are selected."""


SMALL_BYTES = 2**28
"""With fewer bytes of parameters (256 MiB), gathering the whole model at once needs no warning."""


def check_policy(policy: Policy | None, option: str) -> None:
    """Raise TypeError if the policy has another type. `option`: its name in the error."""
    if isinstance(policy, Collection) and not isinstance(policy, (str, nn.Module)):
        others = [each for each in policy if not isinstance(each, type)]
        if others:
            raise TypeError(f"`{option}` has {others[0]!r}, which is not a class. Name classes of modules.")
    elif isinstance(policy, nn.Module):
        raise TypeError(
            f"`{option}` is a module, a `{type(policy).__name__}`. Pass its class, or a function of a module that "
            "returns a bool."
        )
    elif policy is not None and not callable(policy):
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


def whole_at_once(module: nn.Module) -> str | None:
    """The warning that a model is all-gathered at once. None: it is small."""
    size = _bytes(module.parameters())
    if size < SMALL_BYTES:
        return None
    warning = (
        f"`{type(module).__name__}` has {size / 2**30:.1f} GiB of parameters, and `strategy='fsdp'` without "
        "`auto_wrap_policy` gathers all of them at once on every rank, which saves no memory in forward."
    )
    block = _largest_repeated(module)
    if block is None:
        return f"{warning} Name the classes of its largest submodules: `FSDPStrategy(auto_wrap_policy={{...}})`."
    kind, count = block
    name = f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__
    return (
        f"{warning} It has {count} submodules of class `{name}`: write `FSDPStrategy(auto_wrap_policy={{{name}}})` to "
        "gather one of them at a time."
    )


def _largest_repeated(module: nn.Module) -> tuple[type[nn.Module], int] | None:
    """The class of which one module has several children, those with the most bytes together, and their number."""
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
