"""Finds DTensors to which torch gave other memory than that of their shard.

`parameter.data = other` changes the storage of the DTensor, and not its local tensor. `torch.eye(..., out=parameter)`,
which `nn.init.eye_` calls, resizes the local tensor to the size of the whole.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor, nn

from fabric.strategies.sharding.dtensor import as_sharded, user_class
from fabric.strategies.torch_internals import disable_dynamo

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

OTHER_DATA = (
    "`parameter.data = ...` and `nn.init.eye_(parameter)` after `fabric.setup` do not change a parameter that is "
    "sharded (a DTensor): {names} of `{model}`. Change it in place: `parameter.data.copy_(...)`, "
    "`parameter.data.clamp_(...)`; or call `nn.init` before `setup`, or in a method `init_weights` or "
    "`reset_parameters` of the model."
)


@final
class Storages:
    """The storage of each tensor, and the shape of its shard, when it was first seen."""

    def __init__(self) -> None:
        self._first: dict[Tensor, tuple[torch.UntypedStorage, torch.Size | None]] = {}

    def is_other(self, tensor: Tensor) -> bool:
        """Whether the tensor has another storage than before, or another shard. Never on the meta device."""
        if tensor.is_meta:
            return False
        sharded = as_sharded(tensor)
        now = tensor.untyped_storage(), None if sharded is None else sharded._local_tensor.shape
        storage, shape = self._first.setdefault(tensor, now)
        return storage is not now[0] or shape != now[1]


@final
class OtherData:
    """The DTensors of a module but for those in `known`, which are compared elsewhere."""

    def __init__(self, module: nn.Module, known: Container[Tensor] = ()) -> None:
        self._model, self._storages = user_class(module).__name__, Storages()
        self._shards = {
            name: each for name, each in module.named_parameters() if as_sharded(each) is not None and each not in known
        }
        if self._shards:
            from fabric.strategies.sharding.slices import write_through

            write_through(cast("DTensor", each) for each in self._shards.values())
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
