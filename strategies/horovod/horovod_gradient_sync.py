"""Average the gradients of one model over Horovod's ranks at the end of each synchronised backward."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero
from fabric.strategies.gradients.sync import NONE, Finish, GradientSync, kind_of, on_gradient, refuse_sparse
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.tensors.packing import exchange
from fabric.strategies.torch_internals import after_backward


@final
class HorovodGradientSync(GradientSync):
    """Averages one model's gradients that have changed since they were averaged last.

    The whole accumulated `.grad` is averaged. A former average within it is equal on all ranks, and averaging leaves it
    unchanged. So accumulation is exact whichever backward passes are synchronised.
    """

    def __init__(self, collective: Collective, module: nn.Module, broadcast_buffers: bool) -> None:
        self.collective, self.name, self.number = collective, type(module).__name__, _number(collective)
        self.additions = AddedParameters(module)
        self.parameters = [one for one in module.parameters() if one.is_floating_point() or one.is_complex()]
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.changed: set[Tensor] = set()
        self.is_due = False
        broadcast_from_rank_zero(collective, [*module.parameters(), *module.buffers()])
        self.kept_hook = self._note
        self.hooks = [on_gradient(parameter, self.kept_hook) for parameter in self.parameters]

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.additions.refuse()
        return function(*args, **kwargs)

    def watch(self) -> Finish | None:
        self.additions.refuse()  # for a loss that was computed without `forward`
        return None

    def parameters_held(self) -> Iterable[Tensor]:
        return self.parameters

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, parameter: Tensor) -> None:
        """Autograd hook: called in each backward, for each gradient that has just changed."""
        self.changed.add(parameter)
        if self.synced:
            # For each gradient, not only the first: a backward that raises silently drops its callbacks.
            self.is_due = True
            after_backward(self._average)

    def _average(self) -> None:
        """Average each gradient that has changed on any rank; a missing gradient is zero. Ranks: all call it."""
        if not self.is_due:
            return
        self.is_due = False
        mine = [kind_of(each.grad) if each in self.changed else NONE for each in self.parameters]
        self.changed.clear()
        words = torch.tensor([self.number, -self.number, *mine], device="cpu")
        highest, lowest, *anywhere = self.collective.all_reduce(words, "max").tolist()
        if (highest, lowest) != (self.number, -self.number):
            raise CollectiveError(
                f"Ranks ran backward through different models: this one through `{self.name}`, number {self.number} of "
                f"the models set up; the ranks' numbers go from {-lowest} to {highest}. Make every rank compute "
                "the same loss.",
                rank=self.collective.rank,
            )
        refuse_sparse(self.parameters, anywhere)
        gradients = [_gradient(each) for each, kind in zip(self.parameters, anywhere, strict=True) if kind != NONE]
        exchange(gradients, partial(self.collective.all_reduce, op="mean"))
        if self.broadcast_buffers:
            broadcast_from_rank_zero(self.collective, self.module.buffers())


def _number(collective: Collective) -> int:
    """How many models this rank has set up so far. Ranks compare the number, to find that their models differ."""
    store = collective.store()
    return 0 if store is None else store.add(f"models/{collective.rank}", 1)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter; zeros are assigned if it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
