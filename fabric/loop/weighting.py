"""Losses with weights: after a window, gradients are the sum of all losses' gradients over the sum of all weights.

Both sums are over all ranks and micro-batches, so padding, shorter batches and ranks with fewer samples do not change
the result. Strategies average gradients over ranks; weighting then divides the averages by the mean weight of the
ranks, which a scalar all-reduce computes that overlaps with backward.
Ranks that hold parts of one model have the same loss and the same weight, so the mean over all ranks equals the mean
over those with data of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.collectives.collective import HOST_DEVICES, Collective
from fabric.strategies.gradients.averaging import average
from fabric.strategies.gradients.in_shards import InShards
from fabric.strategies.gradients.scaling import Factor, scale_gradients
from fabric.strategies.gradients.sync import GradientSync
from fabric.strategies.prepared import Prepared
from fabric.strategies.tensors.dtensor import as_sharded, local_part
from fabric.strategies.tensors.parameters import parameters_of

Weight: TypeAlias = "float | Tensor"

_grad = attrgetter("grad")


@final
class Weighting:
    """The weights of one fabric's losses, by model."""

    def __init__(self, collective: Collective, device: torch.device) -> None:
        """`device`: of this rank."""
        self._collective, self._device = collective, device
        self._kept_back: dict[nn.Module, _Unsynced] = {}

    def note_unweighted(self) -> None:
        """Called before a backward without a weight.

        Raises: RuntimeError: its gradients would be added to others that are not divided yet.
        """
        if any(not kept.is_discarded() for kept in self._kept_back.values()):
            raise RuntimeError(_MIXED)

    def accumulate(
        self, models: Sequence[Prepared], weight: Weight, run: Callable[[], None], optimizers: Iterable[Optimizer]
    ) -> None:
        """Run a backward that does not synchronise gradients. Raises: as `synchronise`."""
        weights = [self._before(model, optimizers) + weight for model in models]
        run()
        self._kept_back.update(
            {model.module: _Unsynced.of(model.sync, each) for model, each in zip(models, weights, strict=True)}
        )

    def synchronise(
        self,
        models: Sequence[Prepared],
        weight: Weight,
        run: Callable[[], None],
        bare: GradientSync | None,
        optimizers: Iterable[Optimizer],
    ) -> None:
        """Run a synchronised backward, and divide by the weights of all ranks. Ranks: all, for the same models.

        Raises: RuntimeError: it would divide gradients that have no weight, or are divided already.
        """
        weights = [self._before(model, optimizers) + weight for model in models]
        factors_of = _start_factors(self._collective, self._device, weights)
        run()
        factors = factors_of()
        for model, factor in zip(models, factors, strict=True):
            model.sync.scale(factor)
            self._kept_back.pop(model.module, None)
        if bare is not None:
            bare.scale(factors[0])

    def _before(self, model: Prepared, optimizers: Iterable[Optimizer]) -> Weight:
        """The sum of the weights of gradients that are not synchronised yet."""
        kept = self._kept_back.get(model.module)
        if kept is None:
            _refuse_present(model, optimizers)
            return 0.0
        if kept.is_discarded():
            del self._kept_back[model.module]
            return 0.0
        return kept.weight


def _refuse_present(model: Prepared, optimizers: Iterable[Optimizer]) -> None:
    stepped = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
    if {*map(_grad, stepped)} <= {None}:  # after `zero_grad`
        return
    held = set(model.sync.parameters_held())
    gradients = [each.grad for each in stepped if each.requires_grad and each in held]
    # An engine refuses a second backward itself.
    if any(_is_nonzero(gradient) for gradient in gradients if not isinstance(gradient, InShards)):
        raise RuntimeError(_PRESENT.format(name=type(uncompiled(model.module)).__name__))


@final
@dataclass(frozen=True, slots=True)
class _Unsynced:
    """The weights of one model's unsynchronised gradients, and its first gradient at that time."""

    sync: GradientSync
    weight: Weight
    gradient: TensorWeakRef | None
    version: int

    @classmethod
    def of(cls, sync: GradientSync, weight: Weight) -> _Unsynced:
        gradient = _first_gradient(sync)
        return cls(sync, weight, None if gradient is None else TensorWeakRef(gradient), _version(gradient))

    def is_discarded(self) -> bool:
        """Whether the gradients were set to None or to zero since."""
        gradient = _first_gradient(self.sync)
        then = None if self.gradient is None else self.gradient()
        is_same = gradient is not None and gradient is then and _version(gradient) == self.version
        if is_same and not isinstance(gradient, InShards):  # whose zeroing counts no version
            return False
        return not any(_is_nonzero(parameter.grad) for parameter in self.sync.parameters_held())


def average_over_ranks(
    collective: Collective, device: torch.device, parameters: Sequence[Tensor], weight: Weight | None
) -> None:
    """See `Fabric.average_gradients`. Ranks: all."""
    if weight is None:
        average(collective, parameters)
        return
    factors_of = _start_factors(collective, device, [weight])
    average(collective, parameters)
    scale_gradients(parameters, factors_of()[0])


def check_weight(weight: Any) -> Weight:
    """The weight as a number, or as a tensor of one element on its device. Raises: TypeError, ValueError."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"`backward(weight=...)` of shape {tuple(weight.shape)}: a loss has one weight. Pass `mask.sum()`."
            )
        if weight.device.type != "cpu":  # its value is not read: that would wait for the device
            return weight.detach().reshape(()).to(_dtype_on(weight.device))
    elif isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(
            f"`backward(weight={weight!r})` is a `{type(weight).__name__}`. Pass the number of samples or tokens that "
            "the loss is a sum over, or a tensor of one element."
        )
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(f"`backward(weight={number})`: a weight is a finite number, zero or more.")
    return number


def _start_factors(
    collective: Collective, device: torch.device, weights: Sequence[Weight]
) -> Callable[[], Sequence[Factor]]:
    """Start to average the weights over the ranks. Returns a function that waits, and returns the factors of the
    gradients."""
    numbers = [weight for weight in weights if not isinstance(weight, Tensor)]
    if collective.size == 1 and len(numbers) == len(weights):
        return lambda: [_inverse(number) for number in numbers]
    if len(numbers) == len(weights) and device.type in HOST_DEVICES:
        sums = collective.start_add_numbers(numbers)
        return lambda: [_inverse(total / collective.size) for total in sums()]
    if device.type not in HOST_DEVICES:  # one rank may have `mask.sum()`, and another 0
        weights = [each if isinstance(each, Tensor) else _on(device, each) for each in weights]
    means = collective.start_all_reduce(_stacked(weights), "mean")
    return lambda: [_inverse(mean) for mean in _numbers(means())]


def _on(device: torch.device, number: float) -> Tensor:
    return torch.full((), number, dtype=_dtype_on(device), device=device)  # `torch.tensor` would wait for the device


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _stacked(weights: Sequence[Weight]) -> Tensor:
    there = next((weight for weight in weights if isinstance(weight, Tensor)), None)
    if there is None:
        return torch.tensor(weights, dtype=torch.float64, device="cpu")
    return torch.stack([there.new_tensor(each) if isinstance(each, float) else each for each in weights])


def _numbers(means: Tensor) -> Sequence[Factor]:
    return means.tolist() if means.device.type == "cpu" else means.unbind()


def _inverse(mean: Factor) -> Factor:
    """The factor of the gradients. If all weights are zero, gradients become zero."""
    if isinstance(mean, Tensor):
        return torch.where(mean == 0, 0, 1 / mean)
    return 1 / mean if mean else 0.0


def _first_gradient(sync: GradientSync) -> Tensor | None:
    return next((p.grad for p in sync.parameters_held() if p.grad is not None), None)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def _is_nonzero(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    if isinstance(gradient, InShards):
        return not gradient.is_zeroed
    gradient = local_part(gradient)
    if type(gradient) is not Tensor and as_sharded(gradient) is None:
        return True  # a subclass of Tensor without values on this rank
    return bool(local_part(gradient).count_nonzero())


_MIXED = (
    "`fabric.backward(loss)` without `weight=` after one with a weight, whose gradients are not divided yet. Give each "
    "backward of a window a weight (of a mean over a batch: `weight=1`), or none."
)
_PRESENT = (
    "`fabric.backward(loss, weight=...)` for `{name}`, which has gradients already: they were divided by the weights "
    "of an earlier backward, or have no weight, and would be divided with the new ones. Write `optimizer.zero_grad()` "
    "before. For one step from several backwards, use `fabric.accumulate(...)`, or `fabric.no_backward_sync(model)` "
    "for all but the last, each with a weight; or add the losses, and call `backward` once."
)
