"""The user's objects as plain state, and back.

What a checkpoint holds is plain, whichever strategy wrote it: a module's tensors under its own names, an optimizer's as
one process of plain PyTorch would have them, by index. So every strategy reads what any other wrote. How a state comes
out of shards and goes back is the strategy's `StateAccess`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.in_place import filled_module, filled_optimizer
from fabric.strategies.checkpoint.loading import in_memory
from fabric.strategies.checkpoint.placed import Placed, on_ranks

Filter = Mapping[str, Callable[[str, Any], bool]]


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives and takes its state: modules, optimizers, schedulers, loaders, the user's own."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""


class PlacedState(ABC):
    """A `Stateful` of which each rank holds a part, as of a model that is distributed. Ranks: all call each method."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0; on the others tensors may be empty."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back, whole on every rank."""

    @abstractmethod
    def place_state(self) -> dict[str, Any]:
        """As `state_dict`, with a `Placed` for each tensor of which other ranks hold a part, or a copy."""

    @abstractmethod
    def load_placed(self, content: Any) -> None:
        """As `load_state_dict`, of a state with a `Stored` for each tensor."""


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

    def place_module(self, module: nn.Module) -> dict[str, Any]:
        """As `read_module`, with a `Placed` for each tensor of which other ranks hold a part, or a copy.

        Nothing is gathered. A tensor that is not `Placed` is rank 0's, whole.
        """
        return self.read_module(module)

    def place_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """As `read_optimizer`, in the same way."""
        return self.read_optimizer(optimizer)

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...] | None]:
        """What the whole state has: the shape of each tensor, None for what is none. No rank talks."""
        return {
            name: tuple(value.shape) if isinstance(value, Tensor) else None
            for name, value in module.state_dict(keep_vars=True).items()
        }

    def group_sizes(self, optimizer: Optimizer) -> list[int]:
        """How many parameters each group has in the whole state. No rank talks."""
        return [len(group["params"]) for group in optimizer.param_groups]

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        """As `write_module`, of a state with a `Stored` for each tensor."""
        self.write_module(module, in_memory(content, mapped=True), strict=strict)

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        """As `write_optimizer`, in the same way."""
        self.write_optimizer(optimizer, in_memory(content))


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

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        self.write_module(module, filled_module(module, content), strict=strict)

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        self.write_optimizer(optimizer, filled_optimizer(optimizer, content))


@final
class ReplicatedState(StateAccess):
    """Every rank has the whole state, the same as all: each writes a part of the parameters and optimizer states.

    Buffers are those of rank 0: statistics may differ from rank to rank.
    """

    def __init__(self, size: int) -> None:
        self._ranks = tuple(range(size))

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        return PLAIN.read_module(module)

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        PLAIN.write_module(module, content, strict=strict)

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        return PLAIN.read_optimizer(optimizer)

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        PLAIN.write_optimizer(optimizer, content)

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        PLAIN.load_module(module, content, strict=strict)

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        PLAIN.load_optimizer(optimizer, content)

    def place_module(self, module: nn.Module) -> dict[str, Any]:
        state = module.state_dict()
        for name, _ in module.named_parameters(remove_duplicate=False):
            if isinstance(state.get(name), Tensor):
                state[name] = on_ranks(state[name], self._ranks)
        return state

    def place_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        content = optimizer.state_dict()
        states = {
            index: {
                name: on_ranks(each, self._ranks) if isinstance(each, Tensor) else each for name, each in own.items()
            }
            for index, own in content["state"].items()
        }
        return {**content, "state": states}


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
    *,
    gathered: bool = True,
) -> dict[str, Any]:
    """Replace each stateful object of `state` by its state; `keep` chooses, per name, which entries stay.

    Loaders that have no state are left out; in a list, None takes their place. `gathered`: rank 0 gets the whole of
    models and optimizers; otherwise each rank what it holds, as `Placed`.
    Ranks: all call it, each with the same names.
    Raises: ValueError: `keep` has a name that `state` has not. TypeError: `keep` names something that is no mapping.
    """
    for name in keep or {}:
        if name not in state:
            raise ValueError(
                f"`filter` has {name!r}, but the state has {', '.join(map(repr, state))}. Filter what is saved."
            )
    reading = _Reading(access, loaders, gathered)
    read = {name: reading.plain(name, value) for name, value in state.items()}
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
    return {name: in_memory(value) for name, value in content.items() if name not in state}


def load_into(target: Stateful, content: dict[str, Any], *, strict: bool, access: FindAccess = plain) -> None:
    """Load `content` into one object; `strict` matters to modules alone."""
    if isinstance(target, nn.Module):
        module = uncompiled(target)
        access(module).load_module(module, content, strict=strict)
    elif isinstance(target, Optimizer):
        access(target).load_optimizer(target, content)
    elif isinstance(target, PlacedState):
        target.load_placed(content)
    else:
        target.load_state_dict(in_memory(content))


def uncompiled(module: nn.Module) -> nn.Module:
    """The module within what `torch.compile(module)` returned: its names carry no prefix."""
    return module._modules.get("_orig_mod") or module


def _given_back(
    name: str, target: Any, content: Any, *, strict: bool, access: FindAccess, loaders: LoaderAccess
) -> Any:
    """What stands in the place of `target` once `content` is loaded: itself, where it took its state."""
    if loaders.is_loader(target):
        loaders.write(name, target, in_memory(content))
        return target
    if isinstance(target, Stateful):
        load_into(target, content, strict=strict, access=access)
        return target
    if not _holds_state(target, loaders):
        return in_memory(content)
    if isinstance(target, dict) and isinstance(content, dict):
        target.update(restore(target, content, strict=strict, access=access, loaders=loaders))
        return target
    if isinstance(content, (list, tuple)) and len(content) == len(target):
        pairs = zip(target, content, strict=True)
        return [_given_back(name, each, part, strict=strict, access=access, loaders=loaders) for each, part in pairs]
    there = f"{len(content)} entries" if isinstance(content, (list, tuple)) else f"a `{type(content).__name__}`"
    raise ValueError(
        f"`state[{name!r}]` is a `{type(target).__name__}` of {len(target)} entries, and the checkpoint has {there} "
        "there. Load into as many objects as were saved."
    )


def _holds_state(value: Any, loaders: LoaderAccess) -> bool:
    if isinstance(value, dict):
        return any(_holds_state(entry, loaders) for entry in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_state(entry, loaders) for entry in value)
    return isinstance(value, Stateful) or loaders.is_loader(value)


def _is_stateless(value: Any, loaders: LoaderAccess) -> bool:
    return loaders.is_loader(value) and not isinstance(value, Stateful)


@final
class _Reading:
    """One pass over a state."""

    def __init__(self, access: FindAccess, loaders: LoaderAccess, gathered: bool) -> None:
        self.access, self.loaders, self.gathered = access, loaders, gathered

    def plain(self, name: str, value: Any) -> Any:
        """The state of an object, and of all in a nest."""
        if isinstance(value, nn.Module):
            module = uncompiled(value)
            access = self.access(module)
            return access.read_module(module) if self.gathered else access.place_module(module)
        if isinstance(value, Optimizer):
            access = self.access(value)
            return access.read_optimizer(value) if self.gathered else access.place_optimizer(value)
        if self.loaders.is_loader(value):
            return self.loaders.read(name, value)
        if isinstance(value, PlacedState) and not self.gathered:
            return value.place_state()
        if isinstance(value, Stateful):
            return value.state_dict()
        if isinstance(value, dict):
            read = {key: self.plain(str(key), entry) for key, entry in value.items()}
            return {key: entry for key, entry in read.items() if entry is not SKIPPED}
        if isinstance(value, (list, tuple)):
            entries = [self.plain(name, entry) for entry in value]
            kept = [None if entry is SKIPPED else entry for entry in entries]
            return tuple(kept) if type(value) is tuple else kept
        return value


def _kept(name: str, value: Any, choose: Callable[[str, Any], bool] | None) -> Any:
    if choose is None:
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`filter[{name!r}]` chooses entries of a mapping, but `state[{name!r}]` is a `{type(value).__name__}`."
        )
    return {key: entry for key, entry in value.items() if choose(key, _shown(entry))}


def _shown(entry: Any) -> Any:
    """What a filter sees: of a tensor that lies in parts, one of its shape and dtype without values."""
    return entry.like if isinstance(entry, Placed) else entry
