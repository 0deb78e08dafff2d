"""Refuse a backward that gives a parameter several gradients in turn, which reducers average the first of.

`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` runs a backward within the backward for each call of a
block. One that is called twice gives its parameters two gradients, the second of which may meet the first on its way to
other ranks. Torch's reducer says so only if it still waits for other parameters then, as it never does for LoRA's.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fabric.strategies.gradients.sync import Finish


def one_gradient_each(parameters: Iterable[Tensor]) -> Finish:
    """Watch a backward: what this returns is called after it, and raises RuntimeError if a parameter got several.

    Cost: a hook of each parameter, so that strategies watch their first backward only.
    """
    arrived: list[Tensor] = []
    trained = (each for each in parameters if each.requires_grad)
    hooks = [each.register_post_accumulate_grad_hook(arrived.append) for each in trained]  # type: ignore[no-untyped-call]

    def finish() -> None:
        for hook in hooks:
            hook.remove()
        if len(arrived) > len(set(arrived)):
            raise RuntimeError("This backward gave parameters several gradients, of which the first is averaged alone.")

    return finish
