"""Gradients of one model, averaged over Horovod's ranks at the end of each synchronised backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.strategies.collectives.call_check import check_call
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.collectives.packing import Spec, exchange
from fabric.strategies.gradients.clipping import NONE, kind_of, on_gradient, refuse_sparse
from fabric.strategies.gradients.sync import Factor, Finish, GradientSync, scale_gradients
from fabric.strategies.module.buffers import buffers_of, follow_rank_zero
from fabric.strategies.module.changes import Contents
from fabric.strategies.torch_internals import after_backward


@final
class HorovodGradientSync(GradientSync):
    """One model's averaging: which gradients have changed since they were averaged last.

    What is averaged is all that has gathered in `.grad`. The part that was averaged before is the same on every rank,
    and its average is itself, so windows of backwards are exact, however many of them are synchronised.
    """

    def __init__(self, collective: Collective, module: nn.Module, broadcast_buffers: bool) -> None:
        self.collective, self.name, self.number = collective, type(module).__name__, _number(collective)
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.changed: set[Tensor] = set()
        self.is_due = self.is_unsynced = False
        self.alike: Contents | None = None  # these started from rank 0's values
        self.hooks: list[RemovableHandle] = []
        self._arrange("setup")

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and not self.contents.is_as_it_was():
            self._arrange("forward after a change")
        return function(*args, **kwargs)

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        before, self.is_unsynced = self.is_unsynced, True
        try:
            yield
        finally:
            self.is_unsynced = before

    def watch(self) -> Finish | None:
        # Where all that the loss is made of is new, no hook of ours is called.
        return None if self.is_unsynced or self.contents.is_as_it_was() else self._refuse_unmet

    def parameters_held(self) -> Iterable[Tensor]:
        return self.parameters

    def scale(self, factor: Factor) -> None:
        scale_gradients(self.parameters_held(), factor)

    def release(self) -> None:
        self._remove_hooks()

    def _arrange(self, moment: str) -> None:
        """Average what the model has now; what is new starts from rank 0's values. Ranks: all."""
        self.contents = Contents(self.module)
        self.parameters = [one for one in self.contents.parameters if one.is_floating_point() or one.is_complex()]
        self.buffered = self.contents.modules if self.broadcast_buffers else []
        lines = [f"{name}: {Spec.of(tensor)}" for name, tensor in _tensors(self.module)]
        check_call(self.collective, "\n".join([f"{moment} of `{self.name}`", *lines]))
        follow_rank_zero(self.collective, self.contents.new_since(self.alike))
        self.alike = self.contents
        self._remove_hooks()
        self.hooks = [on_gradient(parameter, self._note) for parameter in self.parameters]

    def _remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _refuse_unmet(self) -> None:
        """Raise RuntimeError where parameters have gradients that no forward has met: nothing averages those."""
        if self.contents.is_as_it_was():
            return
        known = set(self.contents.parameters)
        named = self.module.named_parameters()
        names = [name for name, each in named if each.grad is not None and each not in known]
        if names:
            some = ", ".join(map(repr, names[:5]))
            raise RuntimeError(_UNMET.format(model=self.name, names=some))

    def _note(self, parameter: Tensor) -> None:
        """Called by torch, within a backward, for each gradient that has just changed."""
        self.changed.add(parameter)
        if not self.is_unsynced:
            # Each time, not only the first: a backward that raises forgets what was queued, and we do not hear of it.
            self.is_due = True
            after_backward(self._average)

    def _average(self) -> None:
        """Average, over the ranks, each gradient that has changed on any of them; elsewhere it counts as zero."""
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
        follow_rank_zero(self.collective, buffers_of(self.buffered))


def _number(collective: Collective) -> int:
    """How many models this rank has set up so far. Gradients are averaged model by model, and ranks may mistake one
    for another."""
    store = collective.store()
    return 0 if store is None else store.add(f"models/{collective.rank}", 1)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, made of zeros where this rank has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


_UNMET = (
    "This backward computed gradients of parameters that came to `{model}` after `fabric.setup` and that no forward "
    "has met, so they were not averaged over the ranks: {names}. Where the loss comes from a method other than "
    "`forward`, call `model.mark_forward_method('name')` once after `setup`. The weights are unchanged; "
    "`optimizer.zero_grad()` discards the gradients."
)
