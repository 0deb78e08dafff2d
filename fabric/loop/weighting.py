"""Losses with weights: after a window, gradients are the sum of all losses' gradients over the sum of all weights.

Both sums are over all ranks and micro-batches, so padding, shorter batches and ranks with fewer samples do not change
the result. Strategies average gradients over ranks; weighting then divides the averages by the mean weight of the
ranks, which a scalar all-reduce computes that overlaps with backward.
Ranks that hold parts of one model have the same loss and the same weight, so the mean over all ranks equals the mean
over those with data of their own.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import TensorWeakRef

from fabric.strategies.collectives import nested
from fabric.strategies.collectives.collective import HOST_DEVICES, Collective
from fabric.strategies.gradients.sync import Factor, GradientSync, average, scale_gradients
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.dtensor import as_sharded, local_part
from fabric.strategies.tensors.gradient_placeholder import GradientPlaceholder
from fabric.strategies.tensors.parameters import parameters_of, uncompiled

Weight: TypeAlias = float | Tensor


@final
class Weighting:
    """The weights of one fabric's losses, by model."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.is_used = False
        """Whether a loss had a weight."""
        self.kept_back: dict[nn.Module, _Unsynced] = {}
        """Models with gradients that are not synchronised, and so not divided yet."""

    def note_unweighted(self) -> None:
        """Called before a backward without a weight.

        Raises: RuntimeError: its gradients would be added to others that are not divided yet.
        """
        self.kept_back = {module: kept for module, kept in self.kept_back.items() if not kept.is_discarded()}
        if self.kept_back:
            raise RuntimeError(_MIXED)

    def run(
        self,
        backward: Callable[[], None],
        models: Sequence[Prepared],
        bare: GradientSync | None,
        weight: Weight,
        optimizers: Iterable[Optimizer],
        *,
        is_synchronised: bool,
    ) -> None:
        """Run a backward, and divide gradients by the weights of all ranks if it synchronises them.

        Ranks: all, for the same models, if it does. Raises: RuntimeError: it would divide gradients that have no
        weight, or are divided already.
        """
        self.is_used = True
        weights = [self._before(model, optimizers) + weight for model in models]
        if not is_synchronised:
            backward()
            for model, each in zip(models, weights, strict=True):
                self.kept_back[model.module] = _Unsynced(model.sync, each)
            return
        factors_of = start_factors(self._runtime, weights)
        backward()
        factors = factors_of()
        for model, factor in zip(models, factors, strict=True):
            model.sync.scale(factor)
            self.kept_back.pop(model.module, None)
        if bare is not None:
            bare.scale(factors[0])

    def _before(self, model: Prepared, optimizers: Iterable[Optimizer]) -> Weight:
        """The sum of the weights of gradients that are not synchronised yet."""
        kept = self.kept_back.get(model.module)
        if kept is None:
            _refuse_present(model, optimizers)
            return 0.0
        return 0.0 if kept.is_discarded() else kept.weight


def _refuse_present(model: Prepared, optimizers: Iterable[Optimizer]) -> None:
    stepped = (parameter for optimizer in optimizers for parameter in parameters_of(optimizer))
    present = [each for each in stepped if each.grad is not None and each.requires_grad]
    if not present:  # after `zero_grad`
        return
    held = set(model.sync.parameters_held())
    # An engine refuses a second backward itself.
    gradients = [each.grad for each in present if each in held]
    if any(_is_nonzero(each) for each in gradients if not isinstance(each, GradientPlaceholder)):
        raise RuntimeError(_PRESENT.format(name=type(uncompiled(model.module)).__name__))


@final
class _Unsynced:
    """The weights of one model's unsynchronised gradients, and its first gradient at this time."""

    def __init__(self, sync: GradientSync, weight: Weight) -> None:
        self._sync, self.weight = sync, weight
        gradient = _first_gradient(sync)
        self._then = None if gradient is None else (TensorWeakRef(gradient), gradient._version)

    def is_discarded(self) -> bool:
        """Whether the gradients were set to None or to zero since."""
        gradient = _first_gradient(self._sync)
        # Zeroing of a gradient in shards counts no version.
        if self._then is not None and gradient is not None and not isinstance(gradient, GradientPlaceholder):
            then, version = self._then
            if then() is gradient and gradient._version == version:
                return False
        return not any(_is_nonzero(parameter.grad) for parameter in self._sync.parameters_held())


def average_over_ranks(runtime: Runtime, parameters: Sequence[Tensor], weight: Weight | None) -> None:
    """The implementation of `Fabric.average_gradients`. Ranks: all."""
    if any(as_sharded(parameter) is not None for parameter in parameters):
        raise ValueError(
            "`average_gradients` was given a sharded parameter: each rank holds a different part of it. Set its model "
            "up, and call `fabric.backward`."
        )
    weight = None if weight is None else check_weight(weight)
    factor = runtime.loop_progress.repeated.factor()  # a batch that is repeated has the weight zero
    if weight is not None and not factor:
        weight = 0.0 * weight
    if not factor or (factor != 1 and weight is None):
        scale_gradients(parameters, factor)
    factors_of = None if weight is None else start_factors(runtime, [weight])
    average(runtime.collective.for_gradients(), parameters)
    if factors_of is not None:
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
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(f"`backward(weight={number})`: a weight is a finite number, zero or more.")
    return number


def start_factors(runtime: Runtime, weights: Sequence[Weight]) -> Callable[[], Sequence[Factor]]:
    """Start to average the weights over the ranks. Returns a function that waits, and returns the factors of the
    gradients."""
    collective, device = runtime.collective.for_gradients(), runtime.device
    numbers = [weight for weight in weights if not isinstance(weight, Tensor)]
    if collective.size == 1 and len(numbers) == len(weights):
        return lambda: [_inverse(number) for number in numbers]
    if device.type in HOST_DEVICES and len(numbers) == len(weights):
        sums = collective.start_add_numbers(numbers)
        return lambda: [_inverse(total / collective.size) for total in sums()]
    # Tensors on the device on all ranks: one rank may have `mask.sum()`, and another 0.
    dtype = _dtype_on(device)  # `torch.tensor` would wait for the device, `torch.full` does not
    tensors = [w if isinstance(w, Tensor) else torch.full((), w, dtype=dtype, device=device) for w in weights]
    means = collective.start_all_reduce(torch.stack(tensors), "mean")
    return lambda: [_inverse(mean) for mean in means().unbind()]


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _inverse(mean: Factor) -> Factor:
    """The factor of the gradients. If all weights are zero, gradients become zero."""
    if isinstance(mean, Tensor):
        return torch.where(mean == 0, 0, 1 / mean)
    return 1 / mean if mean else 0.0


def _first_gradient(sync: GradientSync) -> Tensor | None:
    return next((p.grad for p in sync.parameters_held() if p.grad is not None), None)


def _is_nonzero(gradient: Tensor | None) -> bool:
    if isinstance(gradient, GradientPlaceholder):
        return not gradient.is_zeroed
    return gradient is not None and bool(local_part(gradient).count_nonzero())


def average_closure_loss(optimizer: Optimizer, collective: Collective, weighting: Weighting) -> Callable[[], None]:
    """Average the loss that a closure returns to LBFGS over the ranks, as its gradients are. Returns a function that
    undoes it.

    LBFGS is the optimizer of torch that computes with it: the line search chooses the length of a step by it. With the
    losses of their own samples, ranks would take steps of different lengths.
    """
    if not isinstance(optimizer, LBFGS) or collective.size == 1:
        return lambda: None

    def wrap(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of `step` with the closure wrapped. `args[0]` is the optimizer."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        return None if closure is None else ((optimizer, lambda: mean_of(closure())), {})

    def mean_of(loss: Any) -> Any:
        """The mean of the loss over the ranks. Ranks: all. Raises: RuntimeError: it is not the loss of all samples."""
        if not isinstance(loss, (Tensor, float)):
            return loss
        own = torch.as_tensor(loss).detach()
        alone = own.double().reshape(())
        mean: Tensor = nested.all_reduce(collective, alone)
        if weighting.is_used and collective.reduce_boolean_decision(bool(mean != alone), require_all=False):
            raise RuntimeError(_CLOSURE)
        return mean.to(own.dtype).reshape(own.shape)

    return hook_steps(optimizer, wrap)


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
_CLOSURE = (
    "The closure of `LBFGS` returned a different loss on each rank, and `LBFGS` chooses its steps by it. "
    "After `fabric.backward(loss, weight=n)` return the loss of all samples: "
    "`fabric.all_reduce(loss.detach(), reduce_op='sum') / fabric.all_reduce(n, reduce_op='sum')`."
)
