"""Finds `parameter.data = other` and `nn.init.eye_(parameter)` of DTensors.

Torch changes the storage of the DTensor for the first, and not its local tensor. For the second it makes each local
tensor as large as the whole parameter.
"""

from __future__ import annotations

from collections.abc import Container
from typing import final

import torch
from torch import Tensor, nn

from fabric.strategies.sharding.dtensor import as_sharded, local_part, user_class
from fabric.strategies.torch_internals import disable_dynamo

OTHER_DATA = (
    "`parameter.data = ...` after `fabric.setup` does not change a parameter that is sharded (a DTensor): {names} of "
    "`{model}`. Change it in place: `parameter.data.copy_(...)`, `parameter.data.clamp_(...)`. Nor does "
    "`nn.init.eye_(parameter)`: call it before `setup`."
)


@final
class Storages:
    """The storage that each DTensor, and the size that its local tensor, had when it was first seen."""

    def __init__(self) -> None:
        self._first: dict[Tensor, tuple[torch.UntypedStorage, int]] = {}

    def is_other(self, tensor: Tensor) -> bool:
        """Whether the DTensor has another storage than before, or as much more in it. Never on the meta device."""
        storage, size = tensor.untyped_storage(), local_part(tensor).numel()
        first, size_then = self._first.setdefault(tensor, (storage, size))
        return not tensor.is_meta and (first is not storage or size != size_then)


@final
class OtherData:
    """The DTensors of a module but for those in `known`, which are compared elsewhere."""

    def __init__(self, module: nn.Module, known: Container[Tensor] = ()) -> None:
        self._model, self._storages = user_class(module).__name__, Storages()
        self._shards = {
            name: each for name, each in module.named_parameters() if as_sharded(each) is not None and each not in known
        }
        self.refuse()

    def refuse(self) -> None:
        """Raise RuntimeError with the names of parameters that were given other data since. 0.4 us each."""
        if self._shards:
            self._refuse()

    @disable_dynamo
    def _refuse(self) -> None:
        moved = [name for name, each in self._shards.items() if self._storages.is_other(each)]
        if moved:
            raise RuntimeError(OTHER_DATA.format(names=", ".join(map(repr, moved[:5])), model=self._model))
