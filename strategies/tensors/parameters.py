"""The parameters of optimizers, of compiled models and of the parts of a model, and their names in messages."""

from collections.abc import Iterator, Sequence

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


def uncompiled(module: nn.Module) -> nn.Module:
    """The module itself, of the result of `torch.compile(module)`, whose names have a prefix."""
    return module._modules.get("_orig_mod") or module


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
