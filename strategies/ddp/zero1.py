"""Optimizer state sharded over ranks that each hold the whole model and its averaged gradients (ZeRO, stage 1).

The optimizer stays the user's own: during its `step` a rank sees the gradients of the parameters that it owns, and so
steps, and keeps state for, exactly those; then every rank takes their new values from their owner. Torch's
ZeroRedundancyOptimizer deals out the same way, but is an optimizer around one it makes itself, which schedulers, hooks
and `isinstance` would meet instead of the user's. Source: Rajbhandari et al., SC 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.fill import fill_from
from fabric.strategies.gradients.elementwise import refuse_dependent
from fabric.strategies.tensors.parameters import parameters_of
from fabric.strategies.undo import replace_attributes, undo_all


def refuse_whole(optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for an optimizer that computes a parameter's step from more than its own gradient."""
    refuse_dependent(optimizers, _WHOLE, flat=False)


_WHOLE = (
    "`shard_optimizer=True` cannot run `{optimizer}`: it computes each step from all gradients, and a rank steps a "
    "part of the parameters. Leave `shard_optimizer` out."
)


def deal_out(collective: Collective, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Let each rank step, and keep state for, its share of the parameters. Returns what takes the hooks off again.

    Ranks: all call it, and from then on `step` of each optimizer; state stays with its owners afterwards.
    """
    return undo_all(undo for optimizer in optimizers for undo in _Share(collective, optimizer).attach())


@final
class _Share:
    """Who owns which parameter of one optimizer, and the gradients that are out of its sight right now."""

    def __init__(self, collective: Collective, optimizer: Optimizer) -> None:
        self.collective, self.optimizer = collective, optimizer
        self.owner: dict[Tensor, int] = {}
        self.hidden: list[tuple[Tensor, Tensor]] = []
        self._deal()

    def attach(self) -> list[Callable[[], None]]:
        self._drop_others()
        return [
            self.optimizer.register_step_pre_hook(self._before_step).remove,
            self.optimizer.register_step_post_hook(self._after_step).remove,
            self.optimizer.register_state_dict_pre_hook(self._refuse_part).remove,
            replace_attributes(
                self.optimizer, load_state_dict=partial(self._load_owned, self.optimizer.load_state_dict)
            ),
        ]

    def _drop_others(self) -> None:
        for parameter in [one for one in self.optimizer.state if self._is_others(one)]:
            del self.optimizer.state[parameter]

    def _deal(self) -> None:
        """Give each parameter that is new, the largest first, to the rank that has the fewest numbers so far."""
        new = [parameter for parameter in parameters_of(self.optimizer) if parameter not in self.owner]
        loads = [0] * self.collective.size
        for parameter, rank in self.owner.items():
            loads[rank] += parameter.numel()
        for parameter in sorted(new, key=Tensor.numel, reverse=True):
            self.owner[parameter] = loads.index(min(loads))
            loads[self.owner[parameter]] += parameter.numel()

    def _is_others(self, key: Any) -> bool:
        return self.owner.get(key, self.collective.rank) != self.collective.rank

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if len(self.owner) != sum(len(group["params"]) for group in optimizer.param_groups):
            self._deal()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._hide()
            return None
        seeing = partial(self._seeing_all, closure)
        return ((optimizer, seeing, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": seeing})

    def _seeing_all(self, closure: Callable[[], Any]) -> Any:
        """The user's closure, which computes all gradients anew, in the middle of a step."""
        self._show()
        loss = closure()
        self._hide()
        return loss

    def _hide(self) -> None:
        """Optimizers skip a parameter without a gradient."""
        self.hidden = [(p, p.grad) for p in self.owner if p.grad is not None and self._is_others(p)]
        for parameter, _ in self.hidden:
            parameter.grad = None

    def _show(self) -> None:
        for parameter, gradient in self.hidden:
            parameter.grad = gradient
        self.hidden = []

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._show()
        self._broadcast(
            [parameter for parameter in self.owner if parameter.requires_grad or parameter.grad is not None]
        )

    def _broadcast(self, moved: Sequence[Tensor]) -> None:
        """Give every rank the values of these parameters that their owners have."""
        fill_from(self.collective, ((parameter, self.owner[parameter]) for parameter in moved))
        # `.data` was written, which autograd does not see: after this, a backward through an earlier forward raises.
        torch.autograd.graph.increment_version(moved)

    def _refuse_part(self, optimizer: Optimizer) -> None:
        own = sum(not self._is_others(parameter) for parameter in self.owner)
        raise RuntimeError(
            f"`{type(optimizer).__name__}.state_dict()` under `shard_optimizer=True`: this rank has the state of {own} "
            f"of {len(self.owner)} parameters. `fabric.save(path, {{'optimizer': optimizer}})`, called by every rank, "
            "writes that of all."
        )

    def _load_owned(self, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
        """Load the part of an unsharded state that belongs to this rank's parameters. Not by a hook: an optimizer whose
        own `load_state_dict` calls that of torch would read the whole of it afterwards."""
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        others = {i for i, p in zip(indices, parameters_of(self.optimizer), strict=False) if self._is_others(p)}
        load({**state_dict, "state": {key: one for key, one in state_dict["state"].items() if key not in others}})
