"""Random numbers for tensors in shards are those that one process would draw for whole tensors.

torch fills each shard with numbers of its own, so that weights depend on how a model is cut, and ranks with one seed
give different shards the same numbers. Here the whole tensor is drawn, as long as it takes to keep this rank's shard.
Numbers that a loop decides by (`mask.any()`, `item()`) are those of the whole tensor. Everything else (`mul_`, `zero_`,
...) is right on shards already, or `DTensor` raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.module.buffers import follow_rank_zero
from fabric.strategies.sharding.dtensor import as_sharded, local_part, shard_like, whole

_ops = torch.ops.aten
_DECISIONS = (_ops.any.default, _ops.all.default, _ops._local_scalar_dense.default)


@final
class WholeDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, operations that draw random numbers for a tensor in shards draw those of the whole, on rank 0.

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
        if func is _ops.new_empty.default:  # for `orthogonal_`: of the size of the whole
            return func(empty(()), *args[1:], **kwargs)
        if func is _ops.copy_.default and as_sharded(args[1]) is None:
            return self._give(sharded, args[1].to(sharded.dtype).expand(sharded.shape).contiguous())
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = func(empty(sharded.shape), *args[1:], **kwargs)
            return self._give(sharded if func._schema.is_mutable else torch.empty_like(sharded), drawn)
        return func(*args, **kwargs)

    def _give(self, sharded: Tensor, values: Tensor) -> Tensor:
        if self._collective.size > 1:
            follow_rank_zero(self._collective, [values])
        local_part(sharded).copy_(local_part(shard_like(values, sharded)))
        return sharded


@final
class Drawing:
    """A method that initialises a part of a model in shards, also after `setup`."""

    def __init__(self, part: nn.Module, name: str, device: torch.device, collective: Collective) -> None:
        self._part, self._name, self._device, self._collective = part, name, device, collective
        self._given: Callable[..., Any] = getattr(part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with WholeDraws(self._device, self._collective):
            return self._given(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._part, self._name)  # of a copy: there it finds the method of the class


def draw_whole(module: nn.Module, device: torch.device, collective: Collective) -> Callable[[], None]:
    """Let the methods by which a model in shards is initialised draw whole tensors. Returns what undoes it."""
    replaced = []
    for part in module.modules():
        for name in ("apply", "init_weights", "reset_parameters"):
            if callable(getattr(part, name, None)) and name not in vars(part):
                object.__setattr__(part, name, Drawing(part, name, device, collective))
                replaced.append((part, name))

    def undo() -> None:
        for part, name in replaced:
            vars(part).pop(name, None)

    return undo
