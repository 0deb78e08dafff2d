"""The dtype in which a reduction is sent, and the dtype of its result.

Every collective reduces through these functions, so the results do not depend on the backend:

| dtype                     | sum, product      | min, max     | mean                                      |
|---------------------------|-------------------|--------------|-------------------------------------------|
| float32, float64          | as it is          | as it is     | sum, then one division                    |
| float16, bfloat16         | as it is          | as it is     | summed in float32: no overflow on the way |
| int8 ... int64, uint8-32  | wraps as in torch | as it is     | summed in int64, given in the default     |
|                           |                   |              | floating-point dtype                      |
| bool                      | product: and      | and, or      | as an integer                             |
| complex                   | sum only          | refused      | sum, then one division                    |

Anything else raises here, with the dtype and the operation named, and not in the backend, with an error code.
"""

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import ReduceOp, check_reduce_op
from fabric.strategies.tensors.packing import check_dense

_AS_IS = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64}
)
# Backends support few integer types. A wider one wraps to the same bits when it is narrowed again.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.bool: torch.uint8}
_HALVES = frozenset({torch.float16, torch.bfloat16})


def reduction_dtype(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """The dtype in which a backend reduces elements of `dtype`.

    Raises: ValueError: `op` is not a reduction, or not defined for the dtype.
    """
    check_reduce_op(op)
    if dtype.is_complex:
        if op not in ("sum", "mean"):
            raise ValueError(_refusal(dtype, op, "Reduce `torch.view_as_real(tensor)`, or its absolute value."))
        return dtype.to_real()
    if op == "mean" and dtype not in _HALVES:
        if dtype in _AS_IS or dtype in _WIDER:
            return dtype if dtype.is_floating_point else torch.int64
        raise ValueError(_refusal(dtype, op, "Convert it to float32 first."))
    if op == "mean":
        return torch.float32
    if dtype in _AS_IS:
        return dtype
    if dtype not in _WIDER:
        raise ValueError(_refusal(dtype, op, "Convert it to float32 or int64 first."))
    if dtype is torch.bool and op == "sum":
        raise ValueError(
            _refusal(dtype, op, "The dtype could not hold a count: convert it with `.long()`, or use 'max' for 'any'.")
        )
    return _WIDER[dtype]


def to_reducible(tensor: Tensor, op: ReduceOp, *, copy: bool) -> Tensor:
    """The contiguous tensor that a backend reduces with sum, product, min or max (mean: sum).

    `copy=False` may return the memory of `tensor` itself. Raises: as `reduction_dtype`; TypeError: the tensor is not
    dense.
    """
    check_dense(tensor)
    dtype = reduction_dtype(tensor.dtype, op)
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.detach().resolve_neg()
    if copy:
        return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return tensor.to(dtype).contiguous()


def from_reduced(reduced: Tensor, op: ReduceOp, dtype: torch.dtype, size: int) -> Tensor:
    """The result for a tensor of `dtype`, from the backend's reduction of `to_reducible` on `size` ranks."""
    if op == "mean":
        if dtype.is_floating_point or dtype.is_complex:
            reduced = reduced.div_(size)
        else:
            return reduced.to(torch.float64).div_(size).to(torch.get_default_dtype())
    if dtype.is_complex:
        return torch.view_as_complex(reduced)
    return reduced if reduced.dtype is dtype else reduced.to(dtype)


def _refusal(dtype: torch.dtype, op: str, instead: str) -> str:
    return f"The {op} of {str(dtype).removeprefix('torch.')} tensors over ranks is not defined. {instead}"
