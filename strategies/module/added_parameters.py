"""Parameters that a backend knows nothing of, for they came to a model, or were unfrozen, after it was set up.

For backends that lay out parameters once: DeepSpeed and FairScale. Asked in every forward that computes gradients, so
it walks through the model only where the model has changed: 0.1 ms for 1000 parameters (see `changes.py`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import final

import torch
from torch import Tensor, nn

from fabric.strategies.module.changes import Contents

_requires_grad = attrgetter("requires_grad")


@final
class Newcomers:
    """What a model has, and trains, that it had not, or did not train, when it was set up.

    `unfrozen`: what was there and is not frozen any more counts as well. `frozen`: what was added and is not trained.
    """

    def __init__(self, module: nn.Module, *, unfrozen: bool, frozen: bool = False) -> None:
        self.module, self.frozen = module, frozen
        self._contents = Contents(module)
        self._there: set[Tensor] = set(self._contents.parameters)
        self._known: set[Tensor] = set(self._contents.trainable()) if unfrozen else self._there
        self._unknown = [each for each in self._contents.parameters if each not in self._known]

    def refuse(self, sentence: str) -> None:
        """Raise RuntimeError where there are any: their names, and the sentence."""
        if torch.compiler.is_compiling():  # the compiler cannot trace the comparison
            return
        has_changed = not self._contents.is_as_it_was()
        if not has_changed and not any(map(_requires_grad, self._unknown)):
            return
        names = [name for name, each in self.module.named_parameters() if self._is_new(each)]
        if names:
            some = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
            raise RuntimeError(
                f"{len(names)} parameters of `{type(self.module).__name__}` ({some}) were added or unfrozen after "
                f"`fabric.setup`. {sentence}"
            )
        self._contents = Contents(self.module)
        self._unknown = [each for each in self._contents.parameters if each not in self._known]

    def _is_new(self, parameter: Tensor) -> bool:
        return parameter not in self._known and (
            parameter.requires_grad or (self.frozen and parameter not in self._there)
        )
