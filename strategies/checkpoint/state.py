"""The user's objects as plain state, and back.

A checkpoint contains plain state, whichever strategy wrote it: a module's tensors by name, an optimizer's by index, as
in one process of plain PyTorch. So every strategy reads what any other wrote. A strategy's `StateAccess` converts
between shards and plain state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.tensors import in_memory, mapped_module, replicated, shown
from fabric.strategies.checkpoint.values import pointer
from fabric.strategies.tensors.dtensor import as_sharded, gathered_weight, local_part, own_part, shard_like, whole
from fabric.strategies.tensors.gradient_placeholder import GradientPlaceholder
from fabric.strategies.tensors.nests import map_only_tensors
from fabric.strategies.tensors.parameters import parameters_of, uncompiled
from fabric.strategies.tensors.wrapper_subclass import is_wrapped, plain_state, plain_tensors

Filter = Mapping[str, Callable[[str, Any], bool]]
RUN = "fabric"
"""The name of the entry for the state of the run: random generators, loss scales, schedulers, steps, loaders."""


class Stateful(Protocol):
    """Any object with a state: modules, optimizers, schedulers, loaders, the user's own. See `is_stateful`."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state."""


def is_stateful(obj: object) -> TypeGuard[Stateful]:
    """Whether the object has a state. A dictionary has one if its class has: some look up any attribute as a key."""
    if isinstance(obj, type):
        return False
    place = type(obj) if isinstance(obj, dict) else obj
    return all(callable(getattr(place, name, None)) for name in ("state_dict", "load_state_dict"))


def named_objects(state: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """All objects of a state, also those in nested dictionaries and lists, each with its JSON pointer."""
    if isinstance(state, (dict, list, tuple)):
        for key, entry in state.items() if isinstance(state, dict) else enumerate(state):
            yield from named_objects(entry, pointer(at, key))
    else:
        yield at, state


class ShardedStateful(Stateful, ABC):
    """A `Stateful` that is distributed, so that each rank holds shards of it. Ranks: all call each method.

    `state_dict` returns the whole state on rank 0; on the others tensors may be empty. `load_state_dict` takes it whole
    on every rank.
    """

    @abstractmethod
    def sharded_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, but with a `TensorShards` for each tensor that other ranks hold shards or replicas of."""

    @abstractmethod
    def load_sharded(self, content: Any) -> None:
        """As `load_state_dict`, from a state with a `Stored` for each tensor."""


class StateAccess(ABC):
    """Reads the state of modules and optimizers, and writes it back. Ranks: all call each method.

    `read_*` returns what `Module.state_dict()` and `Optimizer.state_dict()` would return in one plain process, but with
    a `TensorShards` for each tensor that other ranks hold shards or replicas of: nothing is gathered (see `gathered`).
    Other tensors are those of rank 0. `write_*` takes whole tensors, equal on every rank.
    """

    hooks_read_parameters: ClassVar[bool] = False
    """Whether the strategy's hooks read `Stored` parameters while a submodule loads, so that one at a time is whole."""

    empties_parameters: bool = False
    """Whether parameters have no values between forwards."""

    @abstractmethod
    def read_module(self, module: nn.Module) -> dict[str, Any]:
        """The state of a module that was set up, or of a submodule of it."""

    @abstractmethod
    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        """Load the state of a module; `strict`: the names must be the same."""

    @abstractmethod
    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer."""

    @abstractmethod
    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        """Load the state of an optimizer."""

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...] | None]:
        """The shape of each tensor in the whole state, None for other entries. Ranks: each on its own."""
        return {
            name: tuple(value.shape) if isinstance(value, Tensor) else None
            for name, value in plain_state(module, keep_vars=True).items()
        }

    def group_sizes(self, optimizer: Optimizer) -> list[int]:
        """The number of parameters of each group in the whole state. Ranks: each on its own."""
        return [len(group["params"]) for group in optimizer.param_groups]

    def gather(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Copies of parameters in shards, whole on every rank, through which gradients flow; others as they are."""
        return list(map(gathered_weight, parameters))

    def gradients(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The averaged gradients of a module by name, whole, one at a time. A rank may leave out those of other ranks.

        Ranks: all, after a synchronised backward.
        """
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and not isinstance(parameter.grad, GradientPlaceholder):
                yield name, whole(parameter.grad)

    def scatter(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write whole values, which are equal on every rank, into parameters in shards, without gradients."""
        for parameter, value in zip(parameters, values, strict=True):
            local_part(parameter).copy_(local_part(shard_like(value, parameter)))

    def kept(self, parameter: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor] | None:
        """This rank's part of the gathered copy that forward has computed with, and the shard that this rank keeps.

        None if the parameter is not gathered now.
        """
        sharded = as_sharded(parameter)
        if sharded is None or gathered is parameter:
            return None
        own = own_part(gathered, sharded)
        return own, local_part(sharded).to(own.device, own.dtype)

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        """As `write_module`, from a state with a `Stored` for each tensor."""
        late = self.hooks_read_parameters and not converts(module)  # other hooks may read the parameters
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False) if late}
        self.write_module(module, mapped_module(content, but=parameters), strict=strict)

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        """As `write_optimizer`, from a state with a `Stored` for each tensor."""
        self.write_optimizer(optimizer, in_memory(content))


@final
class PlainState(StateAccess):
    """The objects have the whole state themselves, on every rank.

    `num_replicas`: the number of ranks whose parameters and optimizer states are equal, so that each saves a part. 1:
    rank 0 saves them, as it always saves buffers, whose statistics may differ between ranks.
    """

    def __init__(self, num_replicas: int = 1) -> None:
        self._replicas = tuple(range(num_replicas))

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        module.load_state_dict(content, strict=strict)

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        optimizer.load_state_dict(content)

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        state = plain_state(module)
        for name, _ in module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = self._replicated(state[name])
        return state

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        return map_state(optimizer.state_dict(), lambda index, name, value: self._replicated(value))

    def _replicated(self, value: Any) -> Any:
        is_replicated = len(self._replicas) > 1 and isinstance(value, Tensor) and not is_wrapped(value)
        return replicated(value, self._replicas) if is_replicated else value


PLAIN = PlainState()
FindAccess: TypeAlias = Callable[[nn.Module | Optimizer], StateAccess]
"""Returns the access to a module or an optimizer: that of its strategy if it was set up, else `PLAIN`."""


SKIPPED = object()
"""The state of a loader without a state, which is left out of checkpoints."""


class LoaderAccess(ABC):
    """Reads the state of data loaders, and writes it back. Ranks: all call each method."""

    @abstractmethod
    def is_loader(self, obj: object) -> bool:
        """Whether this is a data loader, prepared or not, with or without a state."""

    def is_stateless(self, obj: object) -> bool:
        """Whether this is a data loader without a state."""
        return self.is_loader(obj) and not is_stateful(obj)

    @abstractmethod
    def read(self, name: str, loader: Any) -> Any:
        """The loader's state, or `SKIPPED`; `name`: the entry in the state. See `ObjectStates.read`."""

    @abstractmethod
    def write(self, name: str, loader: Any, content: Any) -> None:
        """Load it, with a `Stored` for each tensor; `content` is `SKIPPED` if the checkpoint has none."""


@final
@dataclass(frozen=True, slots=True)
class ObjectStates:
    """Reads and restores the states of objects, also in nested dictionaries and lists."""

    access: FindAccess = lambda _: PLAIN
    loaders: LoaderAccess | None = None
    """None: data loaders are objects like others."""

    def read(self, state: Mapping[str, Any], keep: Filter | None = None) -> dict[str, Any]:
        """`state` with each stateful object replaced by its state; `keep` selects entries of it, by the object's name.

        Loaders without a state are left out; in a list, they are None. Each rank gets its shards, as `TensorShards`.
        Ranks: all call it with the same names.
        Raises: ValueError: `keep` has a name that is not in `state`. TypeError: `keep` is no dictionary of functions,
        or names an object without entries.
        """
        keep = keep or {}
        if not isinstance(keep, Mapping) or not all(map(callable, keep.values())):
            raise TypeError(f"`filter={keep!r}`: write a function for a name, `{{'model': lambda name, value: ...}}`.")
        for name in keep:
            if name not in state:
                raise ValueError(
                    f"`filter` has {name!r}, but the state has {', '.join(map(repr, state))}. Use one of these names."
                )
        read = {name: self._read(name, value) for name, value in state.items()}
        return {name: _kept(name, value, keep.get(name)) for name, value in read.items() if value is not SKIPPED}

    def restore(self, state: MutableMapping[str, Any], content: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Load `content` into the objects of `state`, in place; returns the entries that `state` does not name.

        Stateful objects load their state; other entries are replaced.
        Raises: KeyError: `strict`, and `content` lacks a name, except those of loaders without a state.
        """
        for name, target in state.items():
            if self.loaders and self.loaders.is_stateless(target):
                self.loaders.write(name, target, content.get(name, SKIPPED))
            elif strict or name in content:
                state[name] = self._restored(name, target, content[name], strict)
        return {name: in_memory(value) for name, value in content.items() if name not in state}

    def load_into(self, target: Stateful, content: dict[str, Any], *, strict: bool) -> None:
        """Load `content` into one object; `strict` applies only to modules."""
        if isinstance(target, nn.Module):
            module = uncompiled(target)
            self.access(module).load_module(module, _take_wrapped(module, content), strict=strict)
        elif isinstance(target, Optimizer):
            self.access(target).load_optimizer(target, content)
        elif isinstance(target, ShardedStateful):
            target.load_sharded(content)
        else:
            target.load_state_dict(in_memory(content))

    def _restored(self, name: str, target: Any, content: Any, strict: bool) -> Any:
        """What replaces `target` after `content` is loaded: itself, if it is an object that loads its state."""
        if self.loaders and self.loaders.is_loader(target):
            self.loaders.write(name, target, content)
            return target
        if is_stateful(target):
            self.load_into(target, content, strict=strict)
            return target
        objects = [each for _, each in named_objects(target)]
        if not any(is_stateful(each) or (self.loaders and self.loaders.is_loader(each)) for each in objects):
            return in_memory(content)
        if isinstance(target, dict) and isinstance(content, dict):
            target.update(self.restore(target, content, strict=strict))
            return target
        if isinstance(content, (list, tuple)) and len(content) == len(target):
            return [self._restored(name, *pair, strict) for pair in zip(target, content, strict=True)]
        there = f"{len(content)} entries" if isinstance(content, (list, tuple)) else f"a `{type(content).__name__}`"
        raise ValueError(
            f"`state[{name!r}]` is a `{type(target).__name__}` of {len(target)} entries, but the checkpoint has "
            f"{there}. Load into as many objects as were saved."
        )

    def _read(self, name: str, value: Any) -> Any:
        """The state of an object, or a nest with the states of all objects in it."""
        if isinstance(value, nn.Module):
            return self.access(uncompiled(value)).read_module(uncompiled(value))
        if isinstance(value, Optimizer):
            return self.access(value).read_optimizer(value)
        if self.loaders and self.loaders.is_loader(value):
            return self.loaders.read(name, value)
        if isinstance(value, ShardedStateful):
            return value.sharded_state_dict()
        if is_stateful(value):
            return value.state_dict()
        if isinstance(value, dict):
            found = copy(value)  # keeps its class, which may be one that can be saved (`Counter`) or not
            for key, entry in value.items():
                found[key] = self._read(str(key), entry)
                if found[key] is SKIPPED:
                    del found[key]
            return found
        if type(value) in (list, tuple):  # a `torch.Size` has no objects, and a `NamedTuple` cannot be saved
            entries = (self._read(name, entry) for entry in value)
            return type(value)(None if entry is SKIPPED else entry for entry in entries)
        return value


def _take_wrapped(module: nn.Module, content: dict[str, Any]) -> dict[str, Any]:
    """Copy the plain tensors of wrapped ones into those of the module; returns the rest, with the module's own."""
    rest = copy(content)
    for name, tensor in module.state_dict().items():
        if is_wrapped(tensor) and name not in content:
            for key, plain in plain_tensors(tensor, name).items():
                if key in content:
                    plain.copy_(in_memory(rest.pop(key)))
            rest[name] = tensor
    return rest


def _kept(name: str, value: Any, choose: Callable[[str, Any], bool] | None) -> Any:
    if choose is None:
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`filter[{name!r}]` selects entries of a mapping, but `state[{name!r}]` is a `{type(value).__name__}`. "
            "Leave it out of `filter`."
        )
    return {key: entry for key, entry in value.items() if choose(key, shown(entry))}


def map_state(content: dict[str, Any], function: Callable[[Any, str, Any], Any]) -> dict[str, Any]:
    """A state dict of an optimizer, with `function(index, name, value)` in place of each value of a parameter's state.

    In the order of indices; entries under a string belong to no parameter, are kept, and come last. The state dict of
    an optimizer around another one may have another form: then `function` is called for each tensor.
    """
    if "state" not in content:
        of_each: dict[str, Any] = map_only_tensors(partial(function, None, ""), content)
        return of_each
    items = sorted(content["state"].items(), key=lambda item: (isinstance(item[0], str), item[0]))
    states = {
        index: {name: function(index, name, value) for name, value in entries.items()}
        if isinstance(entries, dict)
        else entries
        for index, entries in items
    }
    return {**content, "state": states}


def by_saved_index(optimizer: Optimizer, content: dict[str, Any]) -> dict[Any, Tensor]:
    """The parameters of an optimizer by their indices in a state dict. Torch reports a difference in length."""
    indices = [index for group in content["param_groups"] for index in group["params"]]
    return dict(zip(indices, parameters_of(optimizer), strict=False))


class KeepsNamesAndShapes:
    """A `load_state_dict` hook of this package that changes neither names nor shapes of the state."""


def converts(module: nn.Module) -> bool:
    """Whether a submodule may convert a state before it is loaded, as those that read older checkpoints do."""
    return any(
        any(map(_may_convert, part._load_state_dict_pre_hooks.values()))
        or (
            type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
            and not type(part).__module__.startswith("torch.nn.modules")
        )
        for part in module.modules()
    )


def _may_convert(hook: Any) -> bool:
    """False for the hooks of this package, and for those of torch's sharding, which restore the shards."""
    function = getattr(hook, "hook", hook)
    is_torchs = getattr(function, "__module__", "").startswith("torch.distributed.")
    return not isinstance(function, KeepsNamesAndShapes) and not is_torchs
