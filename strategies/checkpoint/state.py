"""The user's objects as plain state, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

Filter = Mapping[str, Callable[[str, Any], bool]]


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives and takes its state: modules, optimizers, schedulers, loaders, the user's own."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""


def state_of(state: Mapping[str, Any], keep: Filter | None = None) -> dict[str, Any]:
    """Replace each stateful object of `state` by its state; `keep` chooses, per name, which entries stay.

    Raises: ValueError: `keep` has a name that `state` has not. TypeError: `keep` names something that is no mapping.
    """
    for name in keep or {}:
        if name not in state:
            raise ValueError(
                f"`filter` has {name!r}, but the state has {', '.join(map(repr, state))}. Filter what is saved."
            )
    return {name: _kept(name, _plain(value), (keep or {}).get(name)) for name, value in state.items()}


def restore(state: MutableMapping[str, Any], content: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """Give `content` back to the objects of `state`, in place; what `state` does not name is returned.

    Stateful objects load their part, other entries are replaced.
    Raises: KeyError: `strict`, and `content` lacks a name.
    """
    missing = [name for name in state if name not in content]
    if strict and missing:
        raise KeyError(
            f"The checkpoint has {', '.join(map(repr, content))}, and lacks {', '.join(map(repr, missing))}. "
            "Leave it out of the state to load, or pass `strict=False`."
        )
    for name in state:
        if name in content:
            if isinstance(state[name], Stateful):
                load_into(state[name], content[name], strict=strict)
            else:
                state[name] = content[name]
    return {name: value for name, value in content.items() if name not in state}


def load_into(target: Stateful, content: dict[str, Any], *, strict: bool) -> None:
    """Load `content` into one object; `strict` matters to modules alone."""
    if isinstance(target, nn.Module):
        _uncompiled(target).load_state_dict(content, strict=strict)
    else:
        target.load_state_dict(content)


def _uncompiled(module: nn.Module) -> nn.Module:
    """The module within what `torch.compile(module)` returned: its names carry no prefix."""
    return module._modules.get("_orig_mod") or module


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return _uncompiled(value).state_dict()
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def _kept(name: str, value: Any, choose: Callable[[str, Any], bool] | None) -> Any:
    if choose is None:
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`filter[{name!r}]` chooses entries of a mapping, but `state[{name!r}]` is a `{type(value).__name__}`."
        )
    return {key: entry for key, entry in value.items() if choose(key, entry)}
