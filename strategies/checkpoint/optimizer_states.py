"""State dicts of optimizers: their values mapped, and which parameter each state is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def map_state(content: dict[str, Any], function: Callable[[Any, str, Any], Any]) -> dict[str, Any]:
    """A state dict of an optimizer, with `function(index, name, value)` in place of each value of a parameter's state.

    In the order of indices; what is not of a parameter, under a string, stays and comes last.
    """
    items = sorted(content["state"].items(), key=lambda item: (isinstance(item[0], str), item[0]))
    states = {
        index: {name: function(index, name, value) for name, value in entries.items()}
        if isinstance(entries, dict)
        else entries
        for index, entries in items
    }
    return {**content, "state": states}


def by_saved_index(optimizer: Optimizer, content: dict[str, Any]) -> dict[Any, Tensor]:
    """The parameters of an optimizer by their indices in a state dict. Torch reports a difference in length."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in content["param_groups"] for index in group["params"]]
    return dict(zip(indices, parameters, strict=False))
