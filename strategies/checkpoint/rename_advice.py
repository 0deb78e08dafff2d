"""What to write if a checkpoint has the names of a module in another entry, or with a prefix, as other libraries do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import FindAccess, uncompiled

_MAX_NAMES = 10


def in_file(module: nn.Module, content: Any, access: FindAccess) -> str:
    """Where a file that is read as the state of this module has its names; empty if it has none. Ranks: each."""
    names = access(uncompiled(module)).shapes(uncompiled(module)).keys()
    for key, entry in content.items() if isinstance(content, Mapping) else ():
        if _has(entry, names, ""):
            return f"The names are in its entry {key!r}. Write `fabric.load(path, {{{key!r}: module}})`."
        prefix = _prefix(entry, names)
        if prefix is not None:
            return f"The names are in its entry {key!r}, after {prefix!r}. {_without(prefix, f'[{key!r}]')}"
    return _after_prefix(names, content, "")


def in_checkpoint(state: Mapping[str, Any], content: Any, access: FindAccess) -> str:
    """Which entries a checkpoint has instead of the missing ones of `state`, or after which prefix. Ranks: each."""
    missing = [name for name in state if name not in content]
    if missing and content:
        shown = ", ".join(map(repr, list(content)[:_MAX_NAMES])) + (", ..." if len(content) > _MAX_NAMES else "")
        modules = [each for name in missing if isinstance(each := state[name], nn.Module)]
        if any(_has(content, access(uncompiled(each)).shapes(uncompiled(each)).keys(), "") for each in modules):
            return f"It has {shown}: the state of one module. Write `fabric.load_raw(path, module)`."
        return f"It has the entries {shown}."
    for name, each in state.items():
        if isinstance(each, nn.Module) and name in content:
            names = access(uncompiled(each)).shapes(uncompiled(each)).keys()
            found = _after_prefix(names, content[name], f"[{name!r}]")
            if found:
                return found
        elif isinstance(each, Optimizer) and isinstance(content.get(name), Mapping):
            found = _other_groups(access(each).group_sizes(each), content[name].get("param_groups", ()))
            if found:
                return found
    return ""


def _other_groups(here: list[int], groups: Collection[Mapping[str, Any]]) -> str:
    there = [len(group["params"]) for group in groups]
    if len(here) < len(there) and there[: len(here)] == here:
        return "The run that was saved had added groups. Call `optimizer.add_param_group` before `load`, as it did."
    if len(there) < len(here) and here[: len(there)] == there:
        return "The run that was saved had not added all groups. Call `load` before `optimizer.add_param_group`."
    return ""


def _after_prefix(names: Collection[str], content: Any, entry: str) -> str:
    prefix = _prefix(content, names)
    if prefix is not None:
        return f"It has the names after {prefix!r}. {_without(prefix, entry)}"
    inner = _prefix(dict.fromkeys(names), content) if isinstance(content, Mapping) else None
    if inner is None or entry:
        return ""
    return (
        f"It has the names of `module.{inner.rstrip('.')}`. Write `fabric.load_raw(path, module.{inner.rstrip('.')})`."
    )


def _without(prefix: str, entry: str) -> str:
    return (
        f"Before `fabric.setup`, write `module.load_state_dict({{name.removeprefix({prefix!r}): tensor for name, "
        f"tensor in fabric.load(path){entry}.items()}})`."
    )


def _prefix(content: Any, names: Collection[str]) -> str | None:
    """What precedes the names in `content`, and ends with a dot; None if it has them without a prefix, or not."""
    first = next(iter(names), None)
    if first is None or not isinstance(content, Mapping):
        return None
    ending = f".{first}"
    found = (key.removesuffix(first) for key in content if isinstance(key, str) and key.endswith(ending))
    return next((prefix for prefix in found if _has(content, names, prefix)), None)


def _has(content: Any, names: Collection[str], prefix: str) -> bool:
    """Whether `content` has most of the names after the prefix."""
    if not names or not isinstance(content, Mapping):
        return False
    return 2 * sum(prefix + name in content for name in names) > len(names)
