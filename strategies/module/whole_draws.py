"""Random initialisation of sharded tensors equals that of the full tensors in one process.

torch fills each shard with random numbers of its own, so weights depend on the sharding, and ranks with one seed give
different shards the same numbers. Here the full tensor is drawn, and then this rank's shard kept. Values that control a
loop (`mask.any()`, `item()`) are those of the full tensor. All other operations (`mul_`, `zero_`, ...) are right on
shards, or `DTensor` raises.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.strategies.collectives.broadcasts import broadcast_from_rank_zero
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.dtensor import as_sharded, local_part, shard_like, whole

_ops = torch.ops.aten
_DECISIONS = (_ops.any.default, _ops.all.default, _ops._local_scalar_dense.default)


@final
class WholeDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context: random operations on a sharded tensor draw the numbers of the full tensor, on rank 0.

    Ranks: all of `collective`, the same operations in the same order.
    """

    def __init__(self, device: torch.device, collective: Collective) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._collective = device, collective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sharded = as_sharded(args[0]) if args else None
        if sharded is None:
            return func(*args, **kwargs)
        if func in _DECISIONS:
            return func(whole(sharded), *args[1:], **kwargs)
        empty = partial(torch.empty, dtype=sharded.dtype, device=self._device)
        if func is _ops.new_empty.default:  # for `orthogonal_`: with the full size
            return func(empty(()), *args[1:], **kwargs)
        if func is _ops.copy_.default and as_sharded(args[1]) is None:
            return self._give(sharded, args[1].to(sharded.dtype).expand(sharded.shape).contiguous())
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = func(empty(sharded.shape), *args[1:], **kwargs)
            return self._give(sharded if func._schema.is_mutable else torch.empty_like(sharded), drawn)
        return func(*args, **kwargs)

    def _give(self, sharded: Tensor, values: Tensor) -> Tensor:
        if self._collective.size > 1:
            broadcast_from_rank_zero(self._collective, [values])
        local_part(sharded).copy_(local_part(shard_like(values, sharded)))
        return sharded
