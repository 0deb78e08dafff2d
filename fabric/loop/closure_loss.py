"""The loss that a closure returns to LBFGS is averaged over the ranks, as its gradients are.

LBFGS is the optimizer of torch that computes with it: the line search chooses the length of a step by it, and the
inner iterations end by it. With the losses of their own samples, ranks would take steps of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fabric.strategies.collectives import nested
from fabric.strategies.collectives.collective import Collective

_Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@final
class ClosureLoss:
    """Averages the results of closures. `is_weighted`: whether losses have weights, so that their mean over the ranks
    is not the loss of all samples."""

    def __init__(self, collective: Collective, is_weighted: Callable[[], bool]) -> None:
        self._collective, self._is_weighted = collective, is_weighted

    def attach(self, optimizer: Optimizer) -> Callable[[], None]:
        """Do so from now on, if the optimizer computes with a loss. Returns a function that undoes it."""
        if not isinstance(optimizer, LBFGS) or self._collective.size == 1:
            return lambda: None
        return optimizer.register_step_pre_hook(self._wrap).remove

    def _wrap(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """The arguments of `step`, with the closure wrapped. `args[0]` is the optimizer."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def averaged() -> Any:
            return self._mean(closure())

        return ((optimizer, averaged, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": averaged})

    def _mean(self, loss: Any) -> Any:
        """The mean over the ranks. Ranks: all."""
        if not isinstance(loss, (Tensor, float)):
            return loss
        own = torch.as_tensor(loss).detach()
        alone = own.double().reshape(())
        mean: Tensor = nested.all_reduce(self._collective, alone)
        if self._is_weighted() and self._collective.reduce_boolean_decision(bool(mean != alone), require_all=False):
            losses = nested.all_gather(self._collective, alone).reshape(-1).tolist()
            raise RuntimeError(_WEIGHTED.format(losses=", ".join(f"{each:.6g}" for each in losses)))
        return mean.to(own.dtype).reshape(own.shape)


_WEIGHTED = (
    "The closure of `LBFGS` returned a different loss on each rank ({losses}), and `LBFGS` chooses its steps by it. "
    "After `fabric.backward(loss, weight=n)` return the loss of all samples: "
    "`fabric.all_reduce(loss.detach(), reduce_op='sum') / fabric.all_reduce(n, reduce_op='sum')`."
)
