"""The user's objects as plain state, and back.

What a checkpoint holds is whole and plain, whichever strategy wrote it: a module's tensors under its own names, an
optimizer's as one process of plain PyTorch would have them, by index. So every strategy reads what any other wrote,
and `torch.load(path)["model"]` loads into the plain module. How a whole state comes out of shards and goes back is
the strategy's `StateAccess`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from torch import nn
from torch.optim import Optimizer

Filter = Mapping[str, Callable[[str, Any], bool]]


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives and takes its state: modules, optimizers, schedulers, loaders, the user's own."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""


class StateAccess(ABC):
    """How the whole state of modules and optimizers is read, and written back. Ranks: all call each method.

    What `read_*` gives is what `Module.state_dict()` and `Optimizer.state_dict()` of one plain process would give. Rank
    0 has it whole; on the other ranks it may be empty, for they may have no room. What `write_*` takes is that, whole,
    the same on every rank.
    """

    @abstractmethod
    def read_module(self, module: nn.Module) -> dict[str, Any]:
        """The state of a module that was set up, or of a part of it."""

    @abstractmethod
    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        """Load it; `strict`: the names must be the same."""

    @abstractmethod
    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer."""

    @abstractmethod
    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        """Load it."""


@final
class PlainState(StateAccess):
    """Every rank has the whole state in the objects themselves."""

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        return module.state_dict()

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        module.load_state_dict(content, strict=strict)

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        optimizer.load_state_dict(content)


PLAIN = PlainState()
FindAccess: TypeAlias = Callable[[nn.Module | Optimizer], StateAccess]
"""Gives the access of a module or an optimizer: that of its strategy if it was set up, else `PLAIN`."""


def plain(_: nn.Module | Optimizer) -> StateAccess:
    """Nothing was set up."""
    return PLAIN


SKIPPED = object()
"""Read from a loader that has no state: a checkpoint leaves it out."""


class LoaderAccess(ABC):
    """How the state of data loaders is read, and written back. Ranks: all call each method."""

    @abstractmethod
    def is_loader(self, obj: object) -> bool:
        """Whether this is a data loader, prepared or not, with a state or without."""

    @abstractmethod
    def read(self, name: str, loader: Any) -> Any:
        """The loader's state, or `SKIPPED`; `name`: under which it is saved."""

    @abstractmethod
    def write(self, name: str, loader: Any, content: Any) -> None:
        """Load it. Called for a loader without a state, too, which the checkpoint has left out."""


@final
class AnyOther(LoaderAccess):
    """Data loaders are like any other object."""

    def is_loader(self, obj: object) -> bool:
        return False

    def read(self, name: str, loader: Any) -> Any:
        raise AssertionError

    def write(self, name: str, loader: Any, content: Any) -> None:
        raise AssertionError


NO_LOADERS = AnyOther()


def state_of(
    state: Mapping[str, Any],
    keep: Filter | None = None,
    access: FindAccess = plain,
    loaders: LoaderAccess = NO_LOADERS,
) -> dict[str, Any]:
    """Replace each stateful object of `state` by its state; `keep` chooses, per name, which entries stay.

    Loaders that have no state are left out; in a list, None takes their place.
    Ranks: all call it, each with the same names. Rank 0 gets the whole.
    Raises: ValueError: `keep` has a name that `state` has not. TypeError: `keep` names something that is no mapping.
    """
    for name in keep or {}:
        if name not in state:
            raise ValueError(
                f"`filter` has {name!r}, but the state has {', '.join(map(repr, state))}. Filter what is saved."
            )
    read = {name: _plain(name, value, access, loaders) for name, value in state.items()}
    return {name: _kept(name, value, (keep or {}).get(name)) for name, value in read.items() if value is not SKIPPED}


def restore(
    state: MutableMapping[str, Any],
    content: dict[str, Any],
    *,
    strict: bool,
    access: FindAccess = plain,
    loaders: LoaderAccess = NO_LOADERS,
) -> dict[str, Any]:
    """Give `content` back to the objects of `state`, in place; what `state` does not name is returned.

    Stateful objects load their part, wherever in nested dictionaries and lists; other entries are replaced.
    Raises: KeyError: `strict`, and `content` lacks a name, which may be that of a loader without a state.
    """
    missing = [name for name, value in state.items() if name not in content and not _is_stateless(value, loaders)]
    if strict and missing:
        raise KeyError(
            f"The checkpoint has {', '.join(map(repr, content))}, and lacks {', '.join(map(repr, missing))}. "
            "Leave it out of the state to load, or pass `strict=False`."
        )
    for name in state:
        if name in content or _is_stateless(state[name], loaders):
            found = content.get(name, SKIPPED)
            state[name] = _given_back(name, state[name], found, strict=strict, access=access, loaders=loaders)
    return {name: value for name, value in content.items() if name not in state}


def load_into(target: Stateful, content: dict[str, Any], *, strict: bool, access: FindAccess = plain) -> None:
    """Load `content` into one object; `strict` matters to modules alone."""
    if isinstance(target, nn.Module):
        module = uncompiled(target)
        access(module).write_module(module, content, strict=strict)
    elif isinstance(target, Optimizer):
        access(target).write_optimizer(target, content)
    else:
        target.load_state_dict(content)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module within what `torch.compile(module)` returned: its names carry no prefix."""
    return module._modules.get("_orig_mod") or module


def _given_back(
    name: str, target: Any, content: Any, *, strict: bool, access: FindAccess, loaders: LoaderAccess
) -> Any:
    """What stands in the place of `target` once `content` is loaded: itself, where it took its state."""
    if loaders.is_loader(target):
        loaders.write(name, target, content)
        return target
    if isinstance(target, Stateful):
        load_into(target, content, strict=strict, access=access)
        return target
    if not _holds_state(target, loaders):
        return content
    if isinstance(target, dict) and isinstance(content, dict):
        target.update(restore(target, content, strict=strict, access=access, loaders=loaders))
        return target
    if isinstance(content, list) and len(content) == len(target):
        pairs = zip(target, content, strict=True)
        return [_given_back(name, each, part, strict=strict, access=access, loaders=loaders) for each, part in pairs]
    raise ValueError(
        f"`state[{name!r}]` is a `{type(target).__name__}` of {len(target)} entries, and the checkpoint has "
        f"{f'a list of {len(content)}' if isinstance(content, list) else f'a `{type(content).__name__}`'} there. Load "
        "into as many objects as were saved."
    )


def _holds_state(value: Any, loaders: LoaderAccess) -> bool:
    if isinstance(value, dict):
        return any(_holds_state(entry, loaders) for entry in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_state(entry, loaders) for entry in value)
    return isinstance(value, Stateful) or loaders.is_loader(value)


def _is_stateless(value: Any, loaders: LoaderAccess) -> bool:
    return loaders.is_loader(value) and not isinstance(value, Stateful)


def _plain(name: str, value: Any, access: FindAccess, loaders: LoaderAccess) -> Any:
    if isinstance(value, nn.Module):
        module = uncompiled(value)
        return access(module).read_module(module)
    if isinstance(value, Optimizer):
        return access(value).read_optimizer(value)
    if loaders.is_loader(value):
        return loaders.read(name, value)
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, dict):
        read = {key: _plain(str(key), entry, access, loaders) for key, entry in value.items()}
        return {key: entry for key, entry in read.items() if entry is not SKIPPED}
    if isinstance(value, (list, tuple)):
        entries = [_plain(name, entry, access, loaders) for entry in value]
        return [None if entry is SKIPPED else entry for entry in entries]
    return value


def _kept(name: str, value: Any, choose: Callable[[str, Any], bool] | None) -> Any:
    if choose is None:
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`filter[{name!r}]` chooses entries of a mapping, but `state[{name!r}]` is a `{type(value).__name__}`."
        )
    return {key: entry for key, entry in value.items() if choose(key, entry)}
