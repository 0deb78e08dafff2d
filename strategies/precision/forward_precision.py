"""A precision as what happens around forward: inputs cast for a `-true` precision, autocast for a `-mixed` one.

Outputs stay what forward made them. Loss functions called outside forward use `Fabric.autocast()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fabric.strategies.precision.precision import Precision


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which operations choose their dtype; no context for a precision that is not mixed."""
    if not precision.is_mixed:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.compute_dtype)


def casts(precision: Precision) -> bool:
    """Whether the precision changes the dtype of modules and inputs. `32-true` leaves both as the user made them."""
    return not precision.is_mixed and precision.param_dtype != torch.float32


def cast_module(precision: Precision, module: nn.Module) -> None:
    """Give floating-point parameters and buffers the precision's dtype, in place."""
    if casts(precision):
        module.to(precision.param_dtype)


def cast_inputs(precision: Precision, inputs: Any) -> Any:
    """Floating-point tensors of a nest in the precision's dtype; everything else as it is."""
    dtype = precision.param_dtype
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs)
