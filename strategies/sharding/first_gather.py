"""The first all-gather of a unit of `fully_shard`, outside of `torch.inference_mode`.

It makes the tensors that each later one gathers into. If the first forward is an evaluation within
`torch.inference_mode`, they would be inference tensors, which autograd refuses in the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch

from fabric.strategies.module.copies import Hook


@final
class FirstGather:
    """Looks at the first forward of each of the units; then nothing of it is left."""

    def __init__(self, units: Iterable[Any]) -> None:
        self._hooks = {unit: unit.register_forward_pre_hook(Hook(self.before_forward), prepend=True) for unit in units}

    def before_forward(self, unit: Any, *_: Any) -> None:
        """Gather the unit outside of inference mode, if this is its first forward, and within that."""
        if unit in self._hooks:
            self._hooks.pop(unit).remove()
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    unit.unshard()
                    unit.reshard()

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
