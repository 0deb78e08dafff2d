"""The parameters of optimizers and of the parts of a model, and their names in messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def name_some(names: Sequence[str]) -> str:
    """The first three names, with "..." if there are more."""
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by all their names in the state dict, without the prefix of torch's `checkpoint_wrapper`."""
    named = module.named_parameters(remove_duplicate=False)
    return {name.replace("_checkpoint_wrapped_module.", ""): parameter for name, parameter in named}


def own_tensors(unit: nn.Module, units: set[nn.Module]) -> list[Tensor]:
    """The parameters and buffers of a unit that are not in an inner unit, each once."""
    found = {
        id(tensor): tensor
        for part in _own_parts(unit, units)
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    }
    return list(found.values())


def _own_parts(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules of a unit that are not in an inner unit."""
    yield unit
    for child in unit.children():
        if child not in units:
            yield from _own_parts(child, units)


def refuse_tied_apart(module: nn.Module, units: set[nn.Module], option: str) -> None:
    """Raise ValueError if two units share a weight: each would shard a copy of its own. `option`: what chose them."""
    homes: dict[Tensor, nn.Module] = {}
    for unit in units:
        for tensor in own_tensors(unit, units):
            if isinstance(tensor, nn.Parameter) and homes.setdefault(tensor, unit) is not unit:
                named = module.named_parameters(remove_duplicate=False)
                raise ValueError(
                    f"{' and '.join(f'`{name}`' for name, each in named if each is tensor)} are one tied weight, but "
                    f"`{option}` puts them into different parts, and each would have its own from then on. Choose a "
                    "part that holds both, or neither."
                )


def refuse_shared_memory(module: nn.Module) -> None:
    """Raise ValueError if a parameter has memory in common with another tensor, for a strategy that stores parameters
    anew: they would change apart from then on. Side by side in one storage they may be."""
    in_storage: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and 0 not in tensor.stride():
            place = tensor.untyped_storage().data_ptr(), tensor.element_size()
            in_storage.setdefault(place, []).append((name, tensor))
    for (address, size), named in in_storage.items():
        if address == 0 or len(named) == 1:  # 0: empty, or on the meta device
            continue
        taken = torch.zeros(named[0][1].untyped_storage().nbytes() // size, dtype=torch.bool)
        for name, tensor in named:
            elements = taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if elements.any():
                raise ValueError(_SHARED.format(name=name, other=named[0][0], model=type(module).__name__))
            if isinstance(tensor, nn.Parameter):
                elements.fill_(True)


_SHARED = (
    "`{name}` of `{model}` shares memory with `{other}`, as a parameter that was made of `weight.t()` does: this "
    "strategy gives each parameter memory of its own, and they would change apart. Use one parameter in both places, "
    "`functional.linear(x, self.{other}.t())`; or copy it, `weight.t().clone()`; or pass `strategy='ddp'`."
)
