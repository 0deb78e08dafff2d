"""The submodules that an option applies to: the model's blocks, submodules of some classes, or those that a function
chooses."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeAlias

from torch import nn

from fabric.strategies.tensors.dtensor import user_class
from fabric.strategies.tensors.parameters import uncompiled

Classes: TypeAlias = type[nn.Module] | Collection[type[nn.Module]] | Callable[..., bool]
Policy: TypeAlias = Literal["blocks"] | Classes
"""A class, several classes, or a function that returns True for the modules that are selected: `(module)`, or torch's
`(module, recurse, nonwrapped_numel)`; or "blocks": the submodules that `blocks_of` returns."""


def check_policy(policy: object, option: str) -> None:
    """Raise TypeError if the policy has another type. `option`: its name in the error."""
    if policy is None or policy == "blocks":
        return
    if isinstance(policy, Collection) and not isinstance(policy, str):
        fits = all(isinstance(each, type) for each in policy)
    else:
        fits = callable(policy) and not isinstance(policy, nn.Module)
    if not fits:
        raise TypeError(
            f"`{option}={policy!r}` selects no submodules. Pass classes of modules, a function of a module that "
            "returns a bool, or 'blocks'."
        )


def matching(module: nn.Module, policy: Policy | None, option: str) -> list[nn.Module]:
    """The submodules that the policy selects, `module` itself included, outer before inner. None selects none.

    Raises: ValueError: it selects none; "blocks" and functions of torch's form may. TypeError: it has another type.
    """
    if policy is None:
        return []
    check_policy(policy, option)
    if isinstance(policy, str):
        return blocks_of(module)
    if not isinstance(policy, type | Collection) and "recurse" in inspect.signature(policy).parameters:
        wrapped: set[nn.Module] = set()
        _wrap(module, policy, wrapped)
        return [part for part in module.modules() if part in wrapped]
    chosen = [part for part in module.modules() if _selects(policy, part)]
    if not chosen:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"`{option}={_words(policy)}` matches no submodule of the `{type(module).__name__}`, which has the classes "
            f"{', '.join(classes)}. Name some of these classes, or leave the option out."
        )
    return chosen


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of a model: the submodules that repeat in it and hold its parameters, such as transformer layers.

    In models of transformers these are the classes that the model names (`_no_split_modules`). In others they are the
    elements of a `ModuleList` or `Sequential` that are of one class, other than single layers of `torch.nn`, if those
    of the class hold a tenth of the model's parameters. Of blocks within each other the outermost count. A block that
    shares a parameter with the rest of the model is left out, so that a tied weight stays in one place. May be empty.
    """
    named = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    candidates = [part for part in module.modules() if user_class(part).__name__ in named] or _repeated(module)
    owners: dict[Any, set[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(part)
    blocks: list[nn.Module] = []
    within = {module}
    for part in candidates:  # outer before inner
        if part not in within:
            inside = set(part.modules())
            within |= inside
            if all(owners[parameter] <= inside for parameter in part.parameters()):
                blocks.append(part)
    return blocks


def _repeated(module: nn.Module) -> list[nn.Module]:
    """The elements of one class in a container, outer before inner, of the classes that hold much of the model."""
    alike: dict[type[nn.Module], set[nn.Module]] = {}
    for container in module.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            parts = [uncompiled(part) for part in container.children()]
            number = Counter(map(type, parts))
            for part in parts:
                if number[type(part)] > 1 and not _is_single_layer(part):
                    alike.setdefault(type(part), set()).add(part)
    least = num_bytes([module]) / 10
    large = {part for parts in alike.values() if num_bytes(parts) >= least > 0 for part in parts}
    return [part for part in module.modules() if part in large]


def _is_single_layer(part: nn.Module) -> bool:
    """Whether it is a layer of torch's without submodules, or a container that has no forward."""
    is_leaf = user_class(part).__module__.startswith("torch.nn.") and not part._modules
    return is_leaf or isinstance(part, (nn.ModuleList, nn.ModuleDict))


def num_bytes(parts: Iterable[nn.Module]) -> int:
    """The size of all their parameters."""
    return sum(parameter.nbytes for part in parts for parameter in part.parameters())


def _wrap(part: nn.Module, policy: Callable[..., bool], wrapped: set[nn.Module]) -> int:
    """Add the modules that a function of torch's form wraps, inner first; returns their number of elements."""
    total = sum(parameter.numel() for parameter in part.parameters())
    if part in wrapped or not policy(module=part, recurse=True, nonwrapped_numel=total):
        return total if part in wrapped else 0
    inner = sum(_wrap(child, policy, wrapped) for child in part.children())
    if not policy(module=part, recurse=False, nonwrapped_numel=total - inner):
        return inner
    wrapped.add(part)
    return total


def _selects(policy: Classes, part: nn.Module) -> bool:
    if isinstance(policy, type):
        return isinstance(part, policy)
    return isinstance(part, tuple(policy)) if isinstance(policy, Collection) else bool(policy(part))


def _words(policy: Classes) -> str:
    if isinstance(policy, type):
        return policy.__name__
    if isinstance(policy, Collection):
        return "{" + ", ".join(sorted(each.__name__ for each in policy)) + "}"
    return getattr(policy, "__qualname__", repr(policy))
