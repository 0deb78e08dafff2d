"""The parameters of optimizers, and their names in messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


def name_some(names: Sequence[str]) -> str:
    """The first three names, with "..." if there are more."""
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
