"""Clipping, where every rank holds whole gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.strategies.precision.loss_scaler import LossScaler


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_norm(
    optimizer: Optimizer, max_norm: float, norm_type: float, error_if_nonfinite: bool, scaler: LossScaler | None
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`, and give the norm from before.

    With a loss scaler a norm that is not finite is the scaler's business: the step will be skipped, and nothing raises.
    """
    if scaler is not None and not scaler.unscale(optimizer):
        error_if_nonfinite = False
    return torch.nn.utils.clip_grad_norm_(
        parameters_of(optimizer), max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
    )


def clip_value(optimizer: Optimizer, clip_val: float, scaler: LossScaler | None) -> None:
    """Clamp each gradient to `[-clip_val, clip_val]`."""
    if scaler is not None:
        scaler.unscale(optimizer)
    torch.nn.utils.clip_grad_value_(parameters_of(optimizer), clip_val)


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Bring the state of an optimizer, if it has any yet, to the device its parameters have moved to."""
    for state in optimizer.state.values():
        for name, value in state.items():
            # A step count lies where its optimizer put it: on the CPU, unless fused or capturable.
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device)
