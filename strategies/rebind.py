"""Optimizers follow parameters that a strategy replaces: the user's own optimizer, made before `setup`, goes on.

Sharding makes new parameter objects. What ties old to new is the name in the module, so groups keep their options,
tied weights stay one, state that is already there moves along, and the optimizer stays the object it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.shards import shard_like, shard_state


@contextmanager
def follow(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Within it parameters of `module` may be replaced; afterwards the optimizers hold the new ones.

    Gradients and state that were there are laid out as the new parameters are. Names stay as they were.
    """
    before = dict(module.named_parameters(remove_duplicate=False))
    yield
    after = dict(module.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    replaced: dict[Tensor, nn.Parameter] = {}
    for name, parameter in before.items():
        new = replaced.setdefault(parameter, after[name])
        assert new is after[name], f"{name} was tied, and is no longer"
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
