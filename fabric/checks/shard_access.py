"""Whether the program takes shards of DTensors for the whole, between a backward and the next forward.

`item()` of a sum, a norm or a maximum returns that of this rank's shard, and a slice along the sharded dimension is a
copy, so that what is written to it is lost: both silently (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.checks.agreement import SanitizerError
from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.torch_internals import current_dispatch_mode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@final
class ShardAccess(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation on a DTensor from `begin` to `end`, which the same thread calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: dict[int, DTensor] = {}
        """Slices that are copies, by their ids."""

    def begin(self) -> None:
        """Look from now on, unless the program has entered a mode of its own, which it could not leave any more."""
        if current_dispatch_mode() is None:
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Look no longer."""
        if current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        self._copies.clear()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raises: SanitizerError: the operator reads or writes this rank's part alone."""
        tensor = as_sharded(args[0]) if args else None  # views and writes name it first
        if tensor is None:
            return operator(*args, **kwargs or {})
        if operator is torch.ops.aten._local_scalar_dense.default and any(
            each.is_partial() for each in tensor.placements
        ):
            raise SanitizerError(_PARTIAL)
        is_copy = id(tensor) in self._copies
        if is_copy and operator._schema.is_mutable:
            raise SanitizerError(_COPY.format(operator=operator.overloadpacket.__name__, shape=tuple(tensor.shape)))
        result = operator(*args, **kwargs or {})
        made = as_sharded(result)
        if made is not None and operator.is_view and (is_copy or _is_gathered(made, tensor)):
            self._copies[id(made)] = made
        return result


def _is_gathered(view: DTensor, tensor: DTensor) -> bool:
    pairs = zip(view.placements, tensor.placements, strict=True)
    return any(after.is_replicate() and not before.is_replicate() for after, before in pairs)


_PARTIAL = (
    "`item()`, `float` or `bool` of a DTensor that each rank has a part of, such as the sum or the norm of a sharded "
    "parameter: it would be the number of this rank's shard. Write `.full_tensor().item()`, which all ranks call."
)
_COPY = (
    "`{operator}` writes to a slice of a sharded parameter, of shape {shape}. The slice crosses shards, so it is a "
    "copy, and what is written to it is lost. Use a mask, `weight.mul_(mask)` with `mask` distributed like `weight`, "
    "or change the weights before `fabric.setup`."
)
_ITEM = torch.ops.aten._local_scalar_dense.default
