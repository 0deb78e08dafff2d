"""Average the gradients of one model over Horovod's ranks at the end of each synchronised backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.strategies.collectives.call_check import check_call
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.gradients.clipping import NONE, kind_of, on_gradient, refuse_sparse
from fabric.strategies.gradients.sync import Finish, GradientSync
from fabric.strategies.module.buffers import broadcast_from_rank_zero, buffers_of
from fabric.strategies.module.changes import Contents
from fabric.strategies.tensors.packing import Spec, exchange
from fabric.strategies.torch_internals import after_backward


@final
class HorovodGradientSync(GradientSync):
    """Averages one model's gradients that have changed since they were averaged last.

    All that has accumulated in `.grad` is averaged. What was averaged before is equal on all ranks, so averaging it
    again does not change it, and accumulation is exact whichever of its backward passes are synchronised.
    """

    def __init__(self, collective: Collective, module: nn.Module, broadcast_buffers: bool) -> None:
        self.collective, self.name, self.number = collective, type(module).__name__, _number(collective)
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.changed: set[Tensor] = set()
        self.is_due = False
        self.alike: Contents | None = None  # the parameters that were broadcast from rank 0
        self.hooks: list[RemovableHandle] = []
        self._arrange()

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and not self.contents.is_as_it_was():
            self._arrange()
        return function(*args, **kwargs)

    def watch(self) -> Finish | None:
        # If all parameters of the loss were added since, no hook of ours is called.
        return None if not self.synced or self.contents.is_as_it_was() else self._refuse_unmet

    def parameters_held(self) -> Iterable[Tensor]:
        return self.parameters

    def release(self) -> None:
        self._remove_hooks()

    def _arrange(self) -> None:
        """Average the current parameters from now on, and broadcast new ones from rank 0. Ranks: all call it."""
        self.contents = Contents(self.module)
        self.parameters = [one for one in self.contents.parameters if one.is_floating_point() or one.is_complex()]
        self.buffered = self.contents.modules if self.broadcast_buffers else []
        if self.alike is not None:  # those of `setup` were compared there
            lines = [f"{name}: {Spec.of(tensor)}" for name, tensor in _tensors(self.module)]
            check_call(self.collective, "\n".join([f"forward after a change of `{self.name}`", *lines]))
        broadcast_from_rank_zero(self.collective, self.contents.new_since(self.alike))
        self.alike = self.contents
        self._remove_hooks()
        self.hooks = [on_gradient(parameter, self._note) for parameter in self.parameters]

    def _remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _refuse_unmet(self) -> None:
        """Raise RuntimeError if parameters added after the last forward have gradients: they are not averaged."""
        if self.contents.is_as_it_was():
            return
        known = set(self.contents.parameters)
        named = self.module.named_parameters()
        names = [name for name, each in named if each.grad is not None and each not in known]
        if names:
            some = ", ".join(map(repr, names[:5]))
            raise RuntimeError(_UNMET.format(model=self.name, names=some))

    def _note(self, parameter: Tensor) -> None:
        """Autograd hook: called in each backward, for each gradient that has just changed."""
        self.changed.add(parameter)
        if self.synced:
            # Each time, not only the first: a backward that raises drops its callbacks, and does not report it.
            self.is_due = True
            after_backward(self._average)

    def _average(self) -> None:
        """Average each gradient that has changed on any rank; on other ranks it counts as zero. Ranks: all call it."""
        if not self.is_due:
            return
        self.is_due = False
        self._refuse_unmet()
        mine = [kind_of(each.grad) if each in self.changed else NONE for each in self.parameters]
        self.changed.clear()
        words = torch.tensor([self.number, -self.number, *mine], device="cpu")
        highest, lowest, *anywhere = self.collective.all_reduce(words, "max").tolist()
        if (highest, lowest) != (self.number, -self.number):
            raise CollectiveError(
                f"Ranks ran backward through different models: this one through `{self.name}`, number {self.number} of "
                f"those set up; the numbers go from {-lowest} to {highest}. Make every rank compute the same loss.",
                rank=self.collective.rank,
            )
        refuse_sparse(self.parameters, anywhere)
        gradients = [_gradient(each) for each, kind in zip(self.parameters, anywhere, strict=True) if kind != NONE]
        exchange(gradients, partial(self.collective.all_reduce, op="mean"))
        broadcast_from_rank_zero(self.collective, buffers_of(self.buffered))


def _number(collective: Collective) -> int:
    """How many models this rank has set up so far. Ranks compare it, in case they average different models."""
    store = collective.store()
    return 0 if store is None else store.add(f"models/{collective.rank}", 1)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter; zeros are assigned if it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


_UNMET = (
    "This backward computed gradients of parameters that were added to `{model}` after `fabric.setup`, and after its "
    "last forward, so they were not averaged over the ranks: {names}. If the loss comes from a method other than "
    "`forward`, call `model.mark_forward_method('name')` once after `setup`. The weights are unchanged; "
    "`optimizer.zero_grad()` discards the gradients."
)
