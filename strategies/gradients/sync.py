"""The role of what goes on around one prepared model, and the backward that is composed of it.

Every technique has one `GradientSync` for each model: what runs around a forward, whether gradients are synchronised at
present, and what a backward owes. `Prepared` is made from it, and accumulation and weighting are its readers: none of
them asks which technique it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from fabric.strategies.sharding.dtensor import local_part

Factor: TypeAlias = "float | Tensor"
"""A number, or a tensor without dimensions whose value the host does not wait for."""
Finish: TypeAlias = Callable[[], None]
"""Called after a backward: completes its synchronisation, or raises RuntimeError where gradients are wrong."""


class GradientSync(ABC):
    """What is done around forward and backward of one model. Ranks: all make it together, one for each model.

    After a synchronised backward the gradients are those of the mean of the losses of all ranks, whatever has
    accumulated before it, synchronised or not.
    """

    @abstractmethod
    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what `function(*args, **kwargs)` returns: `forward` of the model, or another method that is marked."""

    @abstractmethod
    def unsynced(self) -> AbstractContextManager[None]:
        """Within it gradients stay on the rank that computed them, where the technique has room for them. It nests; on
        exit all is as before, also after an error."""

    @abstractmethod
    def watch(self) -> Finish | None:
        """Called before each backward that may reach the model. None: there is nothing to do after it."""

    @abstractmethod
    def parameters_held(self) -> Iterable[Tensor]:
        """The parameters as optimizers hold them: shards, where `module.parameters()` may give gathered ones."""

    @abstractmethod
    def scale(self, factor: Factor) -> None:
        """Multiply the synchronised gradients that the model has now, and that its optimizers would step with.

        Where an engine of its own reduces gradients, it does so here, and its window of backwards ends. Ranks: all.
        """

    @abstractmethod
    def release(self) -> None:
        """Leave the user's objects as they were, before the process group is destroyed. Called once."""


@final
class LocalGradientSync(GradientSync):
    """One process computes the gradients of the whole batch: nothing is sent."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def unsynced(self) -> AbstractContextManager[None]:
        return nullcontext()

    def watch(self) -> Finish | None:
        return None

    def parameters_held(self) -> Iterable[Tensor]:
        return self.module.parameters()

    def scale(self, factor: Factor) -> None:
        scale_gradients(self.parameters_held(), factor)

    def release(self) -> None:
        pass


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Factor) -> None:
    """Multiply what this rank holds of the gradients of those that are trained."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(local_part(parameter.grad))
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, Tensor) else factor)


def all_of(*finishes: Finish | None) -> Finish | None:
    """One after the other, in this order."""
    present = [finish for finish in finishes if finish is not None]
    if len(present) < 2:
        return present[0] if present else None

    def finish() -> None:
        for each in present:
            each()

    return finish


def backward_through(
    scale_loss: Callable[[Tensor], Tensor] | None, syncs: Sequence[GradientSync]
) -> Callable[..., None]:
    """`backward(loss, *args, **kwargs)` of a loss that may reach any of the models of `syncs`.

    `scale_loss`: what the precision makes of the loss. It comes first: it may bring gradients that are there already to
    another scale.
    """
    watches = [sync.watch for sync in syncs if not isinstance(sync, LocalGradientSync)]

    def backward_alone(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        scaled = loss if scale_loss is None else scale_loss(loss)
        finishes = [finish for watch in watches if (finish := watch()) is not None]
        scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        for finish in finishes:
            finish()

    return backward_alone if scale_loss is None and not watches else backward
