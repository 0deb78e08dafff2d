"""The interface of gradient synchronisation for one prepared model, and the backward that is composed of it.

Every technique has one `GradientSync` per model: it runs forward, knows whether gradients are synchronised at present,
and completes the synchronisation after a backward. `Prepared` is made from it, and accumulation and weighting use it:
none of them asks which technique it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from fabric.strategies.sharding.dtensor import local_part

Factor: TypeAlias = "float | Tensor"
"""A number, or a tensor without dimensions, whose value is not copied to the host."""
Finish: TypeAlias = Callable[[], None]
"""Called after a backward: completes its synchronisation, or raises RuntimeError if gradients are wrong."""

_SINGLE_BYTES = 4
_device, _dtype, _requires_grad = attrgetter("device"), attrgetter("dtype"), attrgetter("requires_grad")


class GradientSync(ABC):
    """Forward and backward of one model. Ranks: all create it together, one for each model.

    After a synchronised backward the gradients are those of the mean of all ranks' losses, including what has
    accumulated before, whether synchronised or not.
    """

    synced = True
    """Whether backward synchronises gradients at present, if the technique supports that they are not."""

    @abstractmethod
    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `function(*args, **kwargs)`, where `function` is `forward` of the model, or another marked method."""

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Context: gradients are not synchronised, if the technique supports that. It can be nested; on exit the
        previous state is restored, also after an error."""
        before = self.synced
        self.set_synced(False)
        try:
            yield
        finally:
            self.set_synced(before)

    def set_synced(self, synced: bool) -> None:
        """Synchronise gradients or not from now on. For techniques whose backend must be told."""
        self.synced = synced

    @abstractmethod
    def watch(self) -> Finish | None:
        """Called before each backward that may reach the model. May return a function to be called after the
        backward."""

    def explain(self, error: RuntimeError) -> str | None:
        """What to write instead, for an error of the backend in backward whose own words do not say so."""
        return None

    @property
    def averages_before_hooks(self) -> bool:
        """Whether the gradient that a post-accumulate hook of a parameter finds is averaged already."""
        return False

    @property
    def is_replicated(self) -> bool:
        """Whether it is known that all ranks hold the same whole parameters, and average their gradients over all.

        For strategies of which not every model does.
        """
        return False

    @property
    def has_whole_weights(self) -> bool:
        """Whether all ranks hold the same whole parameters, although each has gradients of a part of them."""
        return False

    @abstractmethod
    def parameters_held(self) -> Iterable[Tensor]:
        """The parameters as optimizers hold them: shards, even while `module.parameters()` returns gathered ones."""

    def scale(self, factor: Factor) -> None:
        """Multiply the model's present synchronised gradients, with which its optimizers would step.

        If an engine reduces gradients itself, it does so now, and its window of backwards ends. Ranks: all.
        """
        scale_gradients(self.parameters_held(), factor)

    @abstractmethod
    def release(self) -> None:
        """Restore the user's objects, before the process group is destroyed. Called once."""


@final
class LocalGradientSync(GradientSync):
    """One process computes the gradients of the whole batch: nothing is communicated.

    `run`: what runs forward, if not the method itself: it is called as `run(function, args, kwargs)`.
    """

    averages_before_hooks = True

    def __init__(self, module: nn.Module, run: Callable[..., Any] | None = None) -> None:
        self.module, self._run = module, run

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs) if self._run is None else self._run(function, args, kwargs)

    def watch(self) -> Finish | None:
        return None

    def parameters_held(self) -> Iterable[Tensor]:
        return self.module.parameters()

    def release(self) -> None:
        pass


def scale_gradients(parameters: Iterable[Tensor], factor: Factor) -> None:
    """Multiply this rank's gradients, or its shards of them, of the trained parameters."""
    gradients = [grad for parameter in parameters if parameter.requires_grad and (grad := parameter.grad) is not None]
    if {*map(type, gradients)} <= {Tensor} and not any(map(_requires_grad, gradients)):
        multiply(gradients, factor)
    else:
        with torch.no_grad():  # entered only here: it takes a third of the time of multiplying a few gradients
            multiply([each if type(each) is Tensor else local_part(each) for each in gradients], factor)


def multiply(gradients: list[Tensor], factor: Factor) -> None:
    """Multiply tensors of any dtypes in place, each product rounded once."""
    kinds = {*zip(map(_device, gradients), map(_dtype, gradients), strict=True)}
    for device, dtype in kinds:
        some = gradients if len(kinds) == 1 else [g for g in gradients if (g.device, g.dtype) == (device, dtype)]
        moved = factor.to(device) if isinstance(factor, Tensor) else factor
        if dtype.itemsize < _SINGLE_BYTES:  # torch would round the factor to 16 bits as well: `_foreach_mul_`, `mul_`
            for each in some:
                each.copy_(each.float().mul_(moved))
        elif isinstance(moved, Tensor):
            torch._foreach_mul_(some, moved.to(dtype.to_real()))
        elif device.type == "cpu":
            _multiply_here(some, moved, dtype.to_real())
        else:
            torch._foreach_mul_(some, moved)


def _multiply_here(gradients: list[Tensor], factor: float, dtype: torch.dtype) -> None:
    """Multiply on the CPU by a tensor: a number would be converted for each gradient, 0.5 ms for 300 small ones. The
    tensor is kept, because to create one takes longer here than to multiply a few gradients; see Note [Cold Python] in
    `process_group.py`."""
    kept = _operands[dtype]
    memory, operand = kept.pop() if kept else _new_operand(dtype)  # threads have one each
    memory[0] = factor
    torch._foreach_mul_(gradients, operand)
    kept.append((memory, operand))


def _new_operand(dtype: torch.dtype) -> tuple[array[float], Tensor]:
    memory = array("f" if dtype is torch.float32 else "d", [0.0])
    return memory, torch.frombuffer(memory, dtype=dtype)[0]


_operands: dict[torch.dtype, list[tuple[array[float], Tensor]]] = {torch.float32: [], torch.float64: []}


def all_of(*finishes: Finish | None) -> Finish | None:
    """A function that calls the given ones in order; None if there are none."""
    present = [finish for finish in finishes if finish is not None]
    if len(present) < 2:
        return present[0] if present else None

    def finish() -> None:
        for each in present:
            each()

    return finish


def backward_through(
    scale_loss: Callable[[Tensor], Tensor] | None,
    syncs: Sequence[GradientSync],
    within: AbstractContextManager[None] | None = None,
) -> Callable[..., None]:
    """The function `backward(loss, *args, **kwargs)` for a loss that may reach any of the models of `syncs`.

    `scale_loss`: the precision's loss scaling. It is called first, because it may rescale existing gradients.
    `within`: the context of backward, because activation checkpointing runs forward again in it.
    """
    watches = [sync.watch for sync in syncs if not isinstance(sync, LocalGradientSync)]

    def backward_alone(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        scaled = loss if scale_loss is None else scale_loss(loss)
        finishes = [finish for watch in watches if (finish := watch()) is not None]
        try:
            scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            text = next((text for sync in syncs if (text := sync.explain(error)) is not None), None)
            if text is None:
                raise
            raise RuntimeError(text) from error
        for finish in finishes:
            finish()

    chosen = backward_alone if scale_loss is None and not watches else backward
    return chosen if within is None else partial(_run_within, within, chosen)


def _run_within(context: AbstractContextManager[None], run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with context:
        run(*args, **kwargs)
