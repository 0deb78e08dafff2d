"""Numbers read of a DTensor are those of the whole tensor; a copy between it and a plain tensor says what to write.

Note [Numbers of partial results]: a sum or a norm of a DTensor is a partial result on each rank, which torch reduces
when another operator needs it. `item()`, and with it `float`, `int`, `bool` and `if`, do not reduce it (torch 2.13):
`parameter.grad.norm().item()` was that of this rank's shard, and `if parameter.isnan().any()` differed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fabric.strategies.tensors.dtensor import put_together
from fabric.strategies.torch_internals import require_fully_shard

_aten = torch.ops.aten

Handler = Callable[[Any, "tuple[Any, ...]", "dict[str, Any]"], Any]


def read_whole_tensors() -> None:
    """From now on in this process, `item()` of a DTensor is a collective of its mesh where it must reduce."""
    require_fully_shard()
    handlers().setdefault(_aten._local_scalar_dense.default, _item)
    handlers().setdefault(_aten.copy_.default, _copy)
    # Optimizers of several libraries call these on lists of tensors, and DTensor has no rule for them (torch 2.13).
    handlers().setdefault(_aten._foreach_copy_.default, _copy_each)
    handlers().setdefault(_aten._foreach_maximum_.Scalar, partial(_limit_each, Tensor.clamp_min_))
    handlers().setdefault(_aten._foreach_minimum_.Scalar, partial(_limit_each, Tensor.clamp_max_))


def handlers() -> dict[Any, Handler]:
    """What runs in the place of an operator on DTensors."""
    return cast("dict[Any, Handler]", DTensor._op_dispatcher._custom_op_handlers)


def run_without(handler: Handler, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator as torch does, from within its handler."""
    handlers().pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers()[operator] = handler


def _item(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return operator(tensor._local_tensor)
    with torch.no_grad():
        return operator(put_together(tensor))


def _copy(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    into, values = args[:2]
    if isinstance(into, DTensor) and isinstance(values, DTensor):
        return run_without(_copy, operator, args, kwargs)
    try:
        return run_without(_copy, operator, args, kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(_INTO_SHARDS if isinstance(into, DTensor) else _FROM_SHARDS) from error


def _copy_each(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for into, values in zip(*args[:2], strict=True):
        into.copy_(values, *args[2:], **kwargs)


def _limit_each(limit: Callable[[Tensor, Any], Tensor], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors, value = args
    for each in tensors:
        limit(each, value)


_FROM_SHARDS = (
    "A sharded parameter (a DTensor) was copied into a plain tensor, and this rank has only a shard of it. Into a copy "
    "of the model that is not set up, write `target.load_state_dict(fabric.state_dict(model, all_ranks=True))` on all "
    "ranks. Or set the copy up before the model: `target = fabric.setup_module(copy.deepcopy(model))`; both have "
    "shards then."
)
_INTO_SHARDS = (
    "A plain tensor was copied into a sharded parameter (a DTensor), of which this rank has only a shard. To load "
    "weights of a file, write `fabric.load_raw(path, model)`, or load a state dict before `fabric.setup`. For a tensor "
    "that is the same on all ranks: `parameter.copy_(torch.distributed.tensor.distribute_tensor(tensor, "
    "parameter.device_mesh, parameter.placements, src_data_rank=None))`."
)
