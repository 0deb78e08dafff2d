"""Give an optimizer that was made before `setup` the parameters with which a strategy replaces the old ones.

Sharding creates new parameter objects. Old and new are matched by their names in the module. Parameter groups keep
their options, tied weights stay tied, existing optimizer state is kept, and so is the optimizer object.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.optimizers.owners import needs_owners
from fabric.strategies.sharding.sharded_state import shard_state
from fabric.strategies.tensors.dtensor import shard_like, user_class
from fabric.strategies.tensors.parameters import parameters_by_name


@contextmanager
def rebinding(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context in which parameters of `module` are replaced under the same names; then the optimizers hold the new ones.

    Existing gradients and optimizer state are sharded as the new parameters are.
    Raises: ValueError: a parameter that was replaced had hooks, which nothing would call.
    """
    before = parameters_by_name(module)
    yield
    after = parameters_by_name(module)
    assert before.keys() == after.keys()
    replaced = {name: old for name, old in before.items() if after[name] is not old}
    hooked = [name for name, old in replaced.items() if old._backward_hooks or old._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(HOOKED.format(names=", ".join(map(repr, hooked[:5])), model=user_class(module).__name__))
    rebind(before, after, optimizers)


def rebind(
    before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> None:
    """Replace each parameter of `before` in the optimizers by the parameter of that name in `after`, if there is one.

    Raises: ValueError: the names of a tied parameter have different parameters in `after`.
    """
    replaced: dict[Tensor, nn.Parameter] = {}
    for name, parameter in before.items():
        if name in after and replaced.setdefault(parameter, after[name]) is not after[name]:
            first = next(other for other in before if before[other] is parameter)
            raise ValueError(
                f"`{first}` and `{name}` were one tied parameter, and are two now, which would train separately. "
                "Create the new parameter once, and set it under both names."
            )
    for old, new in replaced.items():
        if old is not new and old.grad is not None:
            new.grad = shard_like(old.grad, new)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
        for old in [parameter for parameter in optimizer.state if parameter in replaced]:
            new, entries = replaced[old], optimizer.state.pop(old)
            if not needs_owners(optimizer):
                entries = {name: shard_state(name, value, new) for name, value in entries.items()}
            optimizer.state[new] = entries


HOOKED = (
    "Backward would not call the hooks (`register_hook`, `register_post_accumulate_grad_hook`) of these parameters of "
    "`{model}`, which are sharded: {names}. Change the gradients between `fabric.backward(loss)` and "
    "`optimizer.step()`, or call `parameter.register_post_accumulate_grad_hook` after `fabric.setup`."
)
