"""Activation checkpointing: a part's activations are not kept, but computed again in backward.

Trades a second forward of the part for the memory between its input and output (Chen et al., arXiv:1604.06174). The
part stays the user's own object, and no name changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def recompute(part: nn.Module) -> Callable[[], None]:
    """Let `part` forget its activations after forward. Returns what undoes it."""
    from torch.utils.checkpoint import checkpoint

    given, forward = vars(part).get("forward"), part.forward

    @functools.wraps(forward)
    def forgetting(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    object.__setattr__(part, "forward", forgetting)

    def undo() -> None:
        if given is None:
            object.__delattr__(part, "forward")
        else:
            object.__setattr__(part, "forward", given)

    return undo
