"""Whether an optimizer updates each element of its parameters independently: it is tried on small tensors.

Backends that shard step slices of flattened parameters on each rank, or some of the parameters. An optimizer that
computes an update from norms, rows or matrices of a parameter, or from all of them (LARS, LAMB, Shampoo, Prodigy), is
then another one, and nothing raises. So its class takes three steps with tensors of a few elements, whole and in
pieces, before it is set up. Called once for each optimizer that is not of torch; takes some milliseconds.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.strategies.accelerators.torch_accelerator import has_streams

_NUM_STEPS = 3
_RATE = 0.1
_SHAPES = ((6, 4), (5,))
_CUT = 13  # within the matrix, and within a row of it


def refuse_without_hooks(optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for an optimizer without hooks of `state_dict`, by which state of several ranks is gathered."""
    for optimizer in optimizers:
        if "_optimizer_state_dict_post_hooks" not in vars(optimizer):
            raise ValueError(_NO_HOOKS.format(optimizer=type(optimizer).__name__))


_NO_HOOKS = (
    "`{optimizer}` has no `state_dict` of torch's: its `__init__` does not call that of `torch.optim.Optimizer`, as in "
    "a wrapper of another optimizer (Lookahead). Here each rank has a part of the state, which could not be gathered. "
    "Set up the optimizer within it, and wrap what `fabric.setup` returned; or pass `strategy='ddp'`."
)


def refuse_dependent(optimizers: Sequence[Optimizer], sentence: str, *, flat: bool) -> None:
    """Raise ValueError if an update of one of these depends on elements that are on another rank.

    `flat`: ranks step slices of flattened parameters; otherwise each rank steps some of the parameters. `sentence`: the
    error, with a place for the name of the `{optimizer}`.
    """
    for optimizer in optimizers:
        if is_independent(optimizer, flat=flat) is False:
            raise ValueError(sentence.format(optimizer=type(optimizer).__name__))


def is_independent(optimizer: Optimizer, *, flat: bool) -> bool | None:
    """Whether steps of pieces are those of the whole; None if that cannot be tried: the step needs a closure or other
    arguments, draws random numbers, or does not run on small tensors. Changes neither the optimizer nor generators."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return True  # whoever calls this refuses LBFGS and others of torch's by name
    groups: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        groups.setdefault(repr(sorted(options.items(), key=lambda item: str(item[0]))), group)
    device = next((each.device for group in groups.values() for each in group["params"]), torch.device("cpu"))
    if device.type == "meta":  # not filled yet
        device = torch.device("cpu")
    with torch.random.fork_rng([device] if has_streams(device) else [], device_type=device.type):
        found = [_tried(optimizer, group, device, flat) for group in groups.values()]
    return False if False in found else None if None in found else True


def _tried(optimizer: Optimizer, group: dict[str, Any], device: torch.device, flat: bool) -> bool | None:
    values = [_numbers(shape, 1.0, device) for shape in _SHAPES]
    gradients = [[_numbers(shape, 2.0 + step, device) for shape in _SHAPES] for step in range(_NUM_STEPS)]
    try:
        whole = _steps(optimizer, group, values, gradients)
        again = _steps(optimizer, group, values, gradients)
    except Exception:  # of the user's class, which may need anything
        return None
    if not torch.equal(whole, again) or not whole.isfinite().all():
        return None
    pieces = _pieces if flat else list
    try:
        parts = [
            _steps(optimizer, group, [value], [[pieces(step)[number]] for step in gradients])
            for number, value in enumerate(pieces(values))
        ]
    except Exception:  # it runs on matrices, but not on a slice
        return False
    return torch.allclose(torch.cat(parts), whole, rtol=1e-4, atol=1e-6)


def _steps(
    optimizer: Optimizer, group: dict[str, Any], values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> Tensor:
    """What the parameters are after steps of a copy of the optimizer, flattened."""
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    tried = _copy(optimizer, group, parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(tried)
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _copy(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: list[torch.nn.Parameter],
    memo: dict[int, Any] | None = None,
) -> Optimizer:
    """The optimizer with these parameters and no state, and with it those that it wraps. `memo`: as in `deepcopy`."""
    memo = {} if memo is None else memo
    tried: Optimizer = object.__new__(type(optimizer))
    rate = group.get("lr")
    replaced = {} if rate is None else {"lr": torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE}
    memo[id(optimizer)] = tried
    memo.setdefault(id(optimizer.param_groups), [{**group, **replaced, "params": parameters}])
    memo.setdefault(id(optimizer.state), defaultdict(dict))
    memo.update({id(each): parameters[0] for other in optimizer.param_groups for each in other["params"]})
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):  # hooks of the user
            vars(tried)[name] = OrderedDict()
        elif isinstance(value, Optimizer) and id(value) not in memo:
            vars(tried)[name] = _copy(value, group, parameters, memo)
        elif not callable(
            getattr(type(optimizer), name, None)
        ):  # schedulers replace `step` by a method of the instance
            vars(tried)[name] = value
            with suppress(Exception):  # a process group, or a lock
                vars(tried)[name] = copy.deepcopy(value, memo)
    return tried


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return [flat[:_CUT], flat[_CUT:]]


def _numbers(shape: tuple[int, ...], shift: float, device: torch.device) -> Tensor:
    """Numbers of different sizes, none of them zero."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1, dtype=torch.float32, device=device).mul(shift).sin() * 0.7).view(shape)
