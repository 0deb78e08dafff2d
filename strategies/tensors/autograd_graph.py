"""The graph of autograd behind a loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def goes_through(loss: Tensor, name: str) -> bool:
    """Whether a function of autograd whose name begins so is among those that computed the loss."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if node.name().startswith(name):
                return True
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return False
