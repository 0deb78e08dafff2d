"""Average the gradients of one model over XLA's replicas after each synchronised backward."""

from collections.abc import Callable, Iterable
from operator import is_not
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.collectives.fabric_calls_check import check_call
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero
from fabric.strategies.gradients.sync import Finish, GradientSync
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.xla.collective import XLACollective


@final
class XLAGradientSync(GradientSync):
    """Averages one model's gradients over replicas.

    # Note [Averages are new tensors]
    torch_xla's `reduce_gradients` and `optimizer_step` reduce `.grad` in place, and 2.9 loses the reduction if `.grad`
    was changed in place before: by a second backward, by clipping, by unscaling. Replicas then silently diverge. So an
    average is a new tensor, which is assigned to `.grad`. The whole accumulated `.grad` is averaged: a former average
    within it is equal on all ranks, and averaging leaves it unchanged.
    """

    def __init__(
        self, collective: XLACollective, module: nn.Module, *, find_unused_parameters: bool, broadcast_buffers: bool
    ) -> None:
        self.collective = collective
        self.module = module
        self.finds_unused = find_unused_parameters
        self.additions = AddedParameters(module)
        self.all = dict(module.named_parameters())
        self.broadcast_buffers = broadcast_buffers
        broadcast_from_rank_zero(collective, [*module.parameters(), *module.buffers()])
        self._arrange()

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.additions.refuse()
        if torch.is_grad_enabled() and any(flags := self._flags()) and flags != self.flags:
            self._arrange()
        output = function(*args, **kwargs)
        if self.broadcast_buffers and self.synced and torch.is_grad_enabled():
            broadcast_from_rank_zero(self.collective, self.module.buffers())
        return output

    def parameters_held(self) -> Iterable[Tensor]:
        return self.parameters.values()

    def release(self) -> None:
        pass

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.all.values()]

    def _arrange(self) -> None:
        """Average the trainable parameters from now on. Not called while all are frozen, which is temporary."""
        self.flags = self._flags()
        self.parameters = {name: parameter for name, parameter in self.all.items() if parameter.requires_grad}
        self.used: frozenset[str] | None = None

    def watch(self) -> Finish | None:
        if not self.synced or not self.parameters:
            return None
        before = [parameter.grad for parameter in self.parameters.values()]
        versions = [grad._version for grad in before if grad is not None]

        def average() -> None:
            after = [parameter.grad for parameter in self.parameters.values()]
            if any(map(is_not, after, before)) or versions != [g._version for g in before if g is not None]:
                self._average()

        return average

    @torch.no_grad()
    def _average(self) -> None:
        used = self._used_everywhere()
        means = self.collective.means([p.grad for p in used if p.grad is not None])
        for parameter, mean in zip(used, means, strict=True):
            parameter.grad = mean

    def _used_everywhere(self) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged, the same on every rank."""
        mine = frozenset(name for name, parameter in self.parameters.items() if parameter.grad is not None)
        if self.finds_unused:
            return self._used_anywhere()
        if self.used is None:
            check_call(self.collective, "\n".join([f"backward of `{type(self.module).__name__}`", *sorted(mine)]))
            self.used = mine
        if mine != self.used:
            raise RuntimeError(
                f"This backward of `{type(self.module).__name__}` and the first one have gradients of different "
                f"parameters: {', '.join(sorted(mine ^ self.used))}. {UNUSED}"
            )
        return [parameter for name, parameter in self.parameters.items() if name in mine]

    def _used_anywhere(self) -> list[nn.Parameter]:
        """Parameters with a gradient on any rank; if this rank has none, zeros are assigned."""
        parameters = list(self.parameters.values())
        present = torch.tensor([parameter.grad is not None for parameter in parameters], device="cpu")
        anywhere = self.collective.all_reduce(present, "max").tolist()
        used = [parameter for parameter, there in zip(parameters, anywhere, strict=True) if there]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return used


UNUSED = (
    "All replicas average the same parameters in every step. Pass "
    "`XLAStrategy(find_unused_parameters=True)` for a model that leaves some out."
)
