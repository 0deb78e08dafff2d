"""State of a model under FairScale's FullyShardedDataParallel: shard tensors, and gather them.

A shard is one-dimensional, and equally long on every rank: the last ones are padded with zeros. FairScale stores the
unsharded shape on the parameter, as `_orig_size`. With the hooks of this file `state_dict()` of a module, of its
submodules and of optimizers returns unsharded tensors, copied to the CPU, on every rank; `load_state_dict` takes them.
Ranks: all call `state_dict()`; each loads by itself. A checkpoint is written from the shards, by `SlicedState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.strategies.checkpoint.state import (
    PLAIN,
    KeepsNamesAndShapes,
    StateAccess,
    by_saved_index,
    converts,
    map_state,
)
from fabric.strategies.checkpoint.stored import Stored, in_memory, mapped_entry, mapped_module
from fabric.strategies.checkpoint.tensor_shards import TensorShards, flat_shard
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.sharding.flat_shards import FlatShard, hide, show_again
from fabric.strategies.tensors.dtensor import local_part
from fabric.strategies.tensors.parameters import parameters_of
from fabric.strategies.undo import replace_attributes, undo_all

_NUMBERS = ("step", "mu_product", "mu", "eta")
"""State of torch's optimizers that is a scalar for every shape of the parameter."""


def holds_local(parameter: Any) -> bool:
    """Whether the gradient is unsharded and not averaged. Its shape may not show it: `(1,)` may be that of a shard."""
    return getattr(parameter, "_is_local", False) and parameter.grad is not None


def slice_of(whole: Tensor, rank: int, size: int) -> Tensor:
    """This rank's shard, as a copy."""
    flat = whole.detach().reshape(-1)
    length = -(-flat.numel() // size)
    own = flat.new_zeros(length)
    part = flat[rank * length : (rank + 1) * length]
    own[: part.numel()] = part
    return own


def whole_of(collective: Collective, own: Tensor, shape: torch.Size) -> Tensor:
    """All-gather the unsharded tensor, on the CPU. Ranks: all call it."""
    return collective.all_gather(local_part(own).detach()).view(-1)[: shape.numel()].view(shape).to("cpu", copy=True)


@final
class Slices:
    """Whether `state_dict()` of one model gathers, or returns shards, and `load_state_dict` takes what it returns."""

    def __init__(self, collective: Collective) -> None:
        self.collective, self.gathers = collective, True

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Within the context, `state_dict()` of the model returns shards, without communication, and `load_state_dict`
        takes shards."""
        self.gathers = False
        try:
            yield
        finally:
            self.gathers = True


def attach_module(slices: Slices, module: nn.Module) -> Callable[[], None]:
    """Make `state_dict` and `load_state_dict` of a module use unsharded tensors. Returns a function that undoes it."""
    handles: list[RemovableHandle] = []
    for part in module.modules():
        handles.append(part.register_state_dict_post_hook(_Hook(_gather, slices)))  # type: ignore[no-untyped-call]
        handles.append(part.register_load_state_dict_pre_hook(_Hook(_slice, slices)))  # type: ignore[no-untyped-call]
    for last in (_Hook(_gather_renamed, slices), _Hook(_tie)):  # after the others
        handles.append(module.register_state_dict_post_hook(last))  # type: ignore[no-untyped-call]
    return undo_all(handle.remove for handle in handles)


def attach_optimizer(
    collective: Collective, optimizer: Optimizer, check: Callable[[Optimizer], Any]
) -> Callable[[], None]:
    """Shard the state of an optimizer, and make its `state_dict` and `load_state_dict` use unsharded tensors.

    `check` is called before each step. Returns a function that undoes it.
    """
    rank, size = collective.rank, collective.size

    def gather(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
        parameters = parameters_of(optimizer)
        return map_state(content, lambda index, name, value: _whole_entry(collective, name, value, parameters[index]))

    # Not by a hook: an optimizer whose own `load_state_dict` calls that of torch would read whole tensors afterwards.
    def load_sliced(load: Callable[[dict[str, Any]], None], content: dict[str, Any]) -> None:
        by_index = by_saved_index(optimizer, content)
        known = {index: entries for index, entries in content["state"].items() if index in by_index}
        load(
            map_state(
                {**content, "state": known},
                lambda index, name, value: _sliced_entry(name, value, by_index[index], rank, size),
            )
        )

    shown: list[Any] = []

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check(optimizer)
        shown.extend(hide(parameters_of(optimizer)))

    def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        show_again(shown)
        shown.clear()

    for parameter, entries in optimizer.state.items():
        entries.update({name: _sliced_entry(name, value, parameter, rank, size) for name, value in entries.items()})
    return undo_all(
        (
            optimizer.register_step_pre_hook(before_step).remove,
            optimizer.register_step_post_hook(after_step).remove,
            optimizer.register_state_dict_post_hook(gather).remove,
            replace_attributes(optimizer, load_state_dict=partial(load_sliced, optimizer.load_state_dict)),
        )
    )


def _whole_entry(collective: Collective, name: str, value: Any, parameter: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if _is_sliced(name, value, parameter):
        return whole_of(collective, value, parameter._orig_size)
    return value.to("cpu", copy=True)


def _is_sliced(name: str, value: Any, parameter: Any) -> bool:
    return isinstance(value, Tensor) and name not in _NUMBERS and value.shape == parameter.shape


def _sliced_entry(name: str, value: Any, parameter: Any, rank: int, size: int) -> Any:
    if isinstance(value, Tensor) and name not in _NUMBERS and value.shape == parameter._orig_size:
        return slice_of(value, rank, size)
    return value


@final
class _Hook(KeepsNamesAndShapes):
    """A hook on a sharded module. It makes copies raise: they would have shards that nothing gathers."""

    def __init__(self, function: Callable[..., None], *first: Any) -> None:
        self._function, self._first = function, first

    def __call__(self, *args: Any) -> None:
        self._function(*self._first, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(IN_SLICES)


IN_SLICES = (
    "A module under `strategy='ddp_fully_sharded'` cannot be copied or pickled: each rank has shards of its "
    "parameters. Copy it before `fabric.setup`, or load `module.state_dict()`, which is unsharded, into another."
)


def _gather(slices: Slices, part: nn.Module, content: dict[str, Any], prefix: str, _: Any) -> None:
    if not slices.gathers:
        return
    for name, parameter in _in_slices(part):
        if prefix + name in content:
            content[prefix + name] = whole_of(slices.collective, parameter, parameter._orig_size)


def _gather_renamed(slices: Slices, module: nn.Module, content: dict[str, Any], prefix: str, _: Any) -> None:
    """Gather what hooks of the user have renamed before ours found it."""
    for name, value in content.items():
        if slices.gathers and isinstance(value, FlatShard):
            content[name] = whole_of(slices.collective, value.plain, value.whole)


def _tie(module: nn.Module, content: dict[str, Any], prefix: str, _: Any) -> None:
    """All names of a tied parameter have the same tensor, as in a plain module's state."""
    first: dict[Tensor, str] = {}
    for name, parameter in module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False):
        if name in content:
            content[name] = content[first.setdefault(parameter, name)]


def _slice(
    slices: Slices,
    part: nn.Module,
    content: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    if not slices.gathers:
        return
    collective = slices.collective
    for name, parameter in _in_slices(part):
        whole = content.get(prefix + name)
        if not isinstance(whole, Tensor):
            continue
        if whole.shape == parameter._orig_size:
            content[prefix + name] = slice_of(whole, collective.rank, collective.size)
        else:
            content[prefix + name] = parameter  # so that torch's errors do not name shapes of shards
            errors.append(
                f"{prefix + name!r} is {tuple(whole.shape)} in the state, and {tuple(parameter._orig_size)} in the "
                "module."
            )


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def _in_slices(part: nn.Module) -> Sequence[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in part._parameters.items() if parameter is not None]


@final
class SlicedState(StateAccess):
    """Writes the shards of each rank. Unsharded tensors are gathered one by one, and rank 0 keeps them."""

    def __init__(self, slices: Slices) -> None:
        self._slices, self._collective = slices, slices.collective

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        return self._module_state(module, self._kept)

    def read_module_shards(self, module: nn.Module) -> dict[str, Any]:
        return self._module_state(module, self._shards)

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        PLAIN.write_module(module, content, strict=strict)

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._optimizer_state(optimizer, self._kept)

    def read_optimizer_shards(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._optimizer_state(optimizer, self._shards)

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        PLAIN.write_optimizer(optimizer, content)

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        sharded = dict(_named(module))
        values = {name: content[name] for name in sharded if name in content} if isinstance(content, dict) else {}
        if not values or converts(module) or not all(_fits(value, sharded[name]) for name, value in values.items()):
            self.write_module(module, mapped_module(content), strict=strict)
            return
        state = copy(content)  # keeps its class and attributes: torch stores `_metadata` on the state of a module
        for name, value in content.items():
            state[name] = self._filled(sharded[name], value) if name in values else mapped_entry(name, value)
        with self._slices.as_they_are():
            PLAIN.write_module(module, state, strict=strict)

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        by_index = by_saved_index(optimizer, content)

        def own(index: Any, name: str, value: Any) -> Any:
            if index not in by_index or name in _NUMBERS or not _fits(value, by_index[index]):
                return in_memory(value)
            parameter = by_index[index]
            existing = optimizer.state.get(parameter, {}).get(name)
            if not _is_like(existing, parameter, value.dtype):
                existing = torch.zeros(parameter.shape, dtype=value.dtype)
            return self._filled(existing, value)

        state = map_state(content, own)["state"]
        PLAIN.write_optimizer(optimizer, {**in_memory({**content, "state": {}}), "state": state})

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...] | None]:
        with self._slices.as_they_are():
            shapes = super().shapes(module)
        whole = {name: tuple(cast(Any, parameter)._orig_size) for name, parameter in _named(module)}
        return {name: whole.get(name, shape) for name, shape in shapes.items()}

    def _module_state(self, module: nn.Module, entry: _Entry) -> dict[str, Any]:
        with self._slices.as_they_are():
            state = module.state_dict()
        made: dict[Tensor, Any] = {}  # tied weights are one tensor in the file as well
        for name, parameter in _named(module):
            if name in state:
                if parameter not in made:
                    made[parameter] = entry(parameter, cast(Any, parameter)._orig_size)
                state[name] = made[parameter]
        for name, value in state.items():  # renamed by hooks of the user
            if isinstance(value, FlatShard):
                state[name] = entry(value.plain, value.whole)
        return state

    def _optimizer_state(self, optimizer: Optimizer, entry: _Entry) -> dict[str, Any]:
        parameters: list[Any] = parameters_of(optimizer)

        def own(index: Any, name: str, value: Any) -> Any:
            parameter = parameters[index]
            return entry(value, parameter._orig_size) if _is_sliced(name, value, parameter) else value

        return map_state(_ungathered(optimizer), own)

    def _filled(self, own: Tensor, value: Stored) -> Tensor:
        """This rank's shard, filled with its elements."""
        for chunk, part in self._shards(own, torch.Size(value.shape)).shards:
            value.fill(part, chunk)
        return own

    def _kept(self, own: Tensor, shape: torch.Size) -> Tensor:
        whole = self._collective.all_gather(local_part(own).detach()).view(-1)[: shape.numel()].view(shape)
        return whole.to("cpu", copy=True) if self._collective.rank == 0 else torch.empty(0)

    def _shards(self, own: Tensor, shape: torch.Size) -> TensorShards:
        part = local_part(own).detach()
        return flat_shard(shape, self._collective.rank * part.numel(), part, self._collective.rank)


def _fits(value: Any, parameter: Any) -> bool:
    return isinstance(value, Stored) and value.shape == tuple(parameter._orig_size)


def _is_like(existing: Any, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether an entry of the optimizer's state can be filled: it is kept by torch if its dtype is the parameter's."""
    return (
        isinstance(existing, Tensor)
        and existing.shape == parameter.shape
        and existing.dtype == parameter.dtype == dtype
        and existing.is_contiguous()
    )


def _ungathered(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer as shards: our hook, which runs later, has none to gather."""
    slices: dict[int, Any] = {}

    def take(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
        slices.update(content["state"])
        return {**content, "state": {}}

    handle = optimizer.register_state_dict_post_hook(take, prepend=True)
    try:
        content: dict[str, Any] = optimizer.state_dict()
    finally:
        handle.remove()
    return {**content, "state": slices}


_Entry: TypeAlias = Callable[[Tensor, torch.Size], Any]
"""The entry of a tensor in a state, from this rank's shard and the unsharded shape."""
