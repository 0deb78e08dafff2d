"""Clipping of gradients, plain or sharded, or both in one model.

# Note [Norms over several meshes]
torch's own clipping raises if gradients are on different meshes, or if only some are sharded. So gradients are grouped
by mesh and placements: one norm over this rank's shards of a group, one reduction over the group's mesh, and then the
norm of the norms. Scaling and clamping need no communication.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.precision.loss_scaler import LossScaler, all_finite
from fabric.strategies.tensors.dtensor import as_sharded, full_tensor, local_part, on_mesh
from fabric.strategies.tensors.parameters import parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


_ROW = 2**10
"""Elements of one norm in float32 on a CPU, where torch adds up one after the other: at 5 * 10**7 elements it is 0.4 %
low."""


def clip_norm(
    optimizers: Sequence[Optimizer],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    scaler: LossScaler | None,
    across: Collective | None = None,
) -> Tensor:
    """Scale the gradients of all these optimizers so that their norm is at most `max_norm`. Returns the norm before.

    `across`: ranks that hold other parameters of the same model (pipeline stages), whose gradients count, too. With a
    loss scaler a norm that is not finite does not raise: the scaler skips the step of each.
    Ranks: all that hold a shard of a gradient. Raises: RuntimeError: the norm is not finite; nothing was scaled.
    """
    if scaler is not None:
        scaler.finish_backward()
    parameters = [*dict.fromkeys(parameter for each in optimizers for parameter in parameters_of(each))]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    is_whole = across is None and all(as_sharded(gradient) is None for gradient in gradients)
    if is_whole:
        norm = norm_of(gradients, norm_type) if gradients else torch.zeros(())
    else:
        device = None if across is None else across.device
        norm = total_norm(gradients, norm_type) if gradients else torch.zeros((), dtype=torch.float64, device=device)
        norm = norm if across is None else over_ranks(across, norm, norm_type)
    # What reads the norm waits for the device.
    is_finite = not (error_if_nonfinite or scaler is not None) or bool(norm.isfinite())
    if scaler is not None and not scaler.unscale(*optimizers, is_finite=is_finite and norm_type > 0):
        error_if_nonfinite = False
    if error_if_nonfinite and not is_finite:
        raise RuntimeError(
            f"The gradients' total norm of order {norm_type} is {norm.item()}, so they cannot be clipped, and were "
            "left as they are. Pass `error_if_nonfinite=False` to go on all the same."
        )
    if is_whole:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        part = local_part(gradient)
        part.mul_(factor.to(part.device))
    return norm


def clip_value(optimizers: Sequence[Optimizer], clip_val: float, scaler: LossScaler | None) -> None:
    """Clamp each gradient to `[-clip_val, clip_val]`."""
    for optimizer in optimizers:
        if scaler is not None:
            scaler.unscale(optimizer)
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-clip_val, clip_val)


def gradients_are_finite(optimizer: Optimizer, *, scaler: LossScaler | None, any_rank: Callable[[bool], bool]) -> bool:
    """Whether the gradients of an optimizer are finite, on all ranks. A loss scaler decides by itself.

    `any_rank`: whether the argument is True on any rank, where ranks hold different gradients. Ranks: all.
    """
    if scaler is not None:
        return scaler.unscale(optimizer)
    gradients = [local_part(each.grad) for each in parameters_of(optimizer) if each.grad is not None]
    if any(gradient.device.type == "xla" for gradient in gradients):
        return bool(_largest(gradients).isfinite())
    return not any_rank(not all_finite(gradients))


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients together, over all shards; equal on every rank.

    See Note [Norms over several meshes]. Raises: ValueError: an order that is not positive, for shards.
    """
    if norm_type <= 0:
        raise ValueError(f"`norm_type={norm_type}` over shards: write a positive order, such as 2.0 or float('inf').")
    # Powers would overflow in half precision.
    dtype = _norm_dtype(gradients)
    groups: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        sharded = as_sharded(gradient)
        layout = None if sharded is None else (sharded.device_mesh, tuple(sharded.placements))
        groups.setdefault(layout, []).append(local_part(gradient))
    norms = []
    for layout, parts in groups.items():
        held = [part for part in parts if part.numel()]  # a rank beyond a tensor's rows has an empty shard
        norm = norm_of(held, norm_type) if held else parts[0].new_zeros(())
        norms.append(norm if layout is None else _over_mesh(norm.to(dtype), norm_type, *layout))
    stacked = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    together: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return together


@torch.no_grad()
def norm_of(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of plain tensors, as exact as float32 is, of half precision too. Nothing waits for a device."""
    if norm_type == math.inf:
        return _largest(tensors)
    parts: list[Tensor] = []
    for each in tensors:
        if each.device.type == "cpu" and each.layout is torch.strided and each.numel() > 32 * _ROW and norm_type > 0:
            flat, wide = each.reshape(-1), torch.promote_types(each.dtype, torch.float32)
            rows, each = flat[: len(flat) // _ROW * _ROW].view(-1, _ROW), flat[len(flat) // _ROW * _ROW :]
            parts.append(torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=wide).double())
        parts.append(each)
    if halves := [part for part in parts if part.dtype.itemsize < 4]:
        parts = [part for part in parts if part.dtype.itemsize >= 4]
        parts += torch._foreach_norm(halves, norm_type, torch.float32)
    return torch.nn.utils.get_total_norm(parts, norm_type).to(_norm_dtype(tensors))


def _norm_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of a norm of these: the norm of many numbers in float16 may overflow it."""
    return functools.reduce(torch.promote_types, (each.dtype for each in tensors), torch.float32).to_real()


@torch.no_grad()
def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude, or NaN if there is one. Not torch's infinity norm: XLA's loses NaN, and compiles different
    graphs on the replicas (torch_xla 2.9)."""
    device = tensors[0].device
    sizes = [tensor.detach().abs() for tensor in tensors if tensor.numel()]
    largest = torch.stack([size.max().to(device) for size in sizes]).max()
    has_nan = torch.stack([size.isnan().any().to(device) for size in sizes]).any()
    return torch.where(has_nan, torch.nan, largest)


def over_ranks(collective: Collective, norm: Tensor, norm_type: float) -> Tensor:
    """The norm over ranks that hold different parameters. In float64, because their dtypes may differ."""
    local = norm.to(device=collective.device, dtype=torch.float64)
    return _combined(local, norm_type, collective.all_reduce).to(norm.device, norm.dtype)


def _combined(norm: Tensor, norm_type: float, reduce: Callable[[Tensor, Literal["max", "sum"]], Tensor]) -> Tensor:
    if norm_type == math.inf:
        return reduce(norm, "max")
    return reduce(norm**norm_type, "sum").pow(1 / norm_type)


def _over_mesh(norm: Tensor, norm_type: float, mesh: "DeviceMesh", placements: "tuple[Placement, ...]") -> Tensor:
    """The norm over the axes along which tensors are sharded; along the others all ranks have equal values."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def reduce(local: Tensor, operation: str) -> Tensor:
        # Not `is_shard()`: it is False for torch's placement of strided shards (`fully_shard` after tensor parallel).
        over = [Replicate() if each.is_replicate() else Partial(operation) for each in placements]
        return full_tensor(DTensor.from_local(on_mesh(local, mesh), mesh, over, run_check=False))

    return _combined(norm, norm_type, reduce)
