"""Parameters that were added to a model, or unfrozen, after it was set up, and that its backend would not train.

For backends that register parameters once: DeepSpeed and FairScale. Checked in every forward that computes gradients,
at 0.1 ms for 1000 parameters: all modules are visited only after a change (see `changes.py`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import final

import torch
from torch import Tensor, nn

from fabric.strategies.module.changes import Contents
from fabric.strategies.tensors.parameters import name_some

_requires_grad = attrgetter("requires_grad")


@final
class AddedParameters:
    """Finds trainable parameters that a model did not have when this was constructed.

    `unfrozen`: also those that were frozen then. `frozen`: also added parameters that do not require gradients.
    """

    def __init__(self, module: nn.Module, *, unfrozen: bool, frozen: bool = False) -> None:
        self.module, self.frozen = module, frozen
        self._contents = Contents(module)
        self._there: set[Tensor] = set(self._contents.parameters)
        self._known: set[Tensor] = set(self._contents.trainable()) if unfrozen else self._there
        self._unknown = [each for each in self._contents.parameters if each not in self._known]

    def refuse(self, sentence: str) -> None:
        """Raise RuntimeError if there are any, with their names and `sentence`."""
        if torch.compiler.is_compiling():  # the compiler cannot trace the comparison
            return
        has_changed = not self._contents.is_as_it_was()
        if not has_changed and not any(map(_requires_grad, self._unknown)):
            return
        names = [name for name, each in self.module.named_parameters() if self._is_new(each)]
        if names:
            raise RuntimeError(
                f"{len(names)} parameters of `{type(self.module).__name__}` ({name_some(names)}) were added or "
                f"unfrozen after `fabric.setup`. {sentence}"
            )
        self._contents = Contents(self.module)
        self._unknown = [each for each in self._contents.parameters if each not in self._known]

    def _is_new(self, parameter: Tensor) -> bool:
        return parameter not in self._known and (
            parameter.requires_grad or (self.frozen and parameter not in self._there)
        )
