"""The state of an optimizer whose parameters are assigned to ranks: each rank has that of its own.

Modules are whole on every rank. Rank 0 gathers for `state_dict`; to be saved, nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import PLAIN, PlainState, StateAccess
from fabric.strategies.checkpoint.stored import in_memory
from fabric.strategies.checkpoint.tensor_shards import no_shards, replicated
from fabric.strategies.checkpoint.wrappers import Wrapped, is_wrapper, on_cpu, put_together, taken_apart
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.packing import Spec
from fabric.strategies.tensors.parameters import parameters_of


@final
class OwnersState(StateAccess):
    """Modules are whole on every rank; the state of an optimizer comes from whoever has it, a parameter at a time."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        return PLAIN.read_module(module)

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        PLAIN.write_module(module, content, strict=strict)

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        PLAIN.load_module(module, content, strict=strict)

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        before = {id(value) for entries in optimizer.state.values() for value in entries.values()}
        PLAIN.write_optimizer(optimizer, in_memory(content, mapped=True))
        # The optimizer has left out what other ranks own, and that was not read. The rest must not stay mapped.
        for entries in optimizer.state.values():
            for name, value in entries.items():
                if isinstance(value, Tensor) and id(value) not in before and not is_wrapper(value):
                    entries[name] = value.clone()

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state, on the CPU of rank 0."""
        parameters, state = parameters_of(optimizer), optimizer.state
        held = self.collective.all_gather_object([i for i, p in enumerate(parameters) if p in state])
        owner = {index: rank for rank, indices in enumerate(held) for index in indices}
        states: dict[Any, Any] = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        for index in sorted(owner):
            own = {name: _sent(value) for name, value in state.get(parameters[index], {}).items()}
            entries = self.collective.broadcast_object(own, src=owner[index])
            if self.collective.rank == 0:
                states[index] = {name: _on_cpu(value) for name, value in entries.items()}
        return {"state": states, "param_groups": _numbered(optimizer)} if self.collective.rank == 0 else {}

    def read_module_shards(self, module: nn.Module) -> dict[str, Any]:
        return PlainState(self.collective.size).read_module_shards(module)

    def read_optimizer_shards(self, optimizer: Optimizer) -> dict[str, Any]:
        parameters = parameters_of(optimizer)
        mine = {index: optimizer.state[each] for index, each in enumerate(parameters) if each in optimizer.state}
        others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        states: dict[Any, Any] = {**others, **shards_by_owner(self.collective, mine)}
        return {"state": states, "param_groups": _numbered(optimizer)}

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        PLAIN.write_optimizer(optimizer, content)


def _numbered(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups, with indices in place of parameters, as in a state dict."""
    place = {parameter: index for index, parameter in enumerate(parameters_of(optimizer))}
    return [{**group, "params": [place[each] for each in group["params"]]} for group in optimizer.param_groups]


def shards_by_owner(collective: Collective, mine: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states of all parameters: this rank's with their tensors, those of other ranks without. Ranks: all.

    Cost: each rank receives shapes and dtypes, about 100 bytes for each tensor.
    """
    described = collective.all_gather_object(
        {index: {name: _described(each) for name, each in entries.items()} for index, entries in mine.items()}
    )
    whole: dict[int, dict[str, Any]] = {}
    for rank, owned in enumerate(described):
        for index, entries in owned.items():
            source = mine[index] if rank == collective.rank else entries
            whole[index] = {name: _shards(value, rank) for name, value in source.items()}
    return dict(sorted(whole.items()))


def _described(value: Any) -> Any:
    whole = _sent(value)
    if isinstance(whole, Wrapped):
        return replace(whole, tensors={name: _described(each) for name, each in whole.tensors.items()})
    return Spec.of(value) if isinstance(value, Tensor) else value


def _shards(value: Any, rank: int) -> Any:
    whole = _sent(value)
    if isinstance(whole, Wrapped):
        return replace(whole, tensors={name: _shards(each, rank) for name, each in whole.tensors.items()})
    if isinstance(value, Spec):
        return no_shards(value.shape, value.dtype)
    return replicated(value, (rank,)) if isinstance(value, Tensor) else value


def _sent(value: Any) -> Any:
    return taken_apart(value) if is_wrapper(value) else value


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Wrapped):
        return on_cpu(put_together(value))
    return value.detach().to("cpu") if isinstance(value, Tensor) else value
