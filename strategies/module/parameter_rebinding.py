"""Optimizers follow parameters that a strategy replaces: the user's own optimizer, made before `setup`, goes on.

Sharding makes new parameter objects. What ties old to new is the name in the module, so groups keep their options,
tied weights stay one, state that is already there moves along, and the optimizer stays the object it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.sharding.dtensor import shard_like, shard_state


@contextmanager
def rebinding(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Within it parameters of `module` may be replaced; afterwards the optimizers hold the new ones.

    Gradients and state that were there are laid out as the new parameters are. Names stay as they were.
    """
    before = parameters_by_name(module)
    yield
    after = parameters_by_name(module)
    assert before.keys() == after.keys()
    rebind(before, after, optimizers)


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under all its names, as the state dict has them: without the prefix of torch's
    `checkpoint_wrapper`."""
    named = module.named_parameters(remove_duplicate=False)
    return {name.replace("_checkpoint_wrapped_module.", ""): parameter for name, parameter in named}


def rebind(
    before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> None:
    """Let the optimizers hold, for each name in `before`, what has it in `after`. A name that is gone changes nothing.

    Raises: ValueError: names of one tied parameter name different ones afterwards.
    """
    replaced: dict[Tensor, nn.Parameter] = {}
    for name, parameter in before.items():
        if name in after and replaced.setdefault(parameter, after[name]) is not after[name]:
            first = next(other for other in before if before[other] is parameter)
            raise ValueError(
                f"`{first}` and `{name}` were one tied parameter, and are two now, which would train apart. Make the "
                "new parameter once, and set it in both places."
            )
    for old, new in replaced.items():
        if old is not new and old.grad is not None:
            new.grad = shard_like(old.grad, new)
    for optimizer in optimizers:
        _rebind(optimizer, replaced)


def _rebind(optimizer: Optimizer, replaced: dict[Tensor, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old in [parameter for parameter in optimizer.state if parameter in replaced]:
        new = replaced[old]
        optimizer.state[new] = {name: shard_state(name, value, new) for name, value in optimizer.state.pop(old).items()}
