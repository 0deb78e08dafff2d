"""Collectives over nested containers of tensors: a batch, a dict of metrics, a dataclass of both.

Small tensors are packed into few messages (100 of 1 KB over gloo, 2 ranks: 1.2-1.7 ms; one message each takes 40-100
ms), large ones are sent alone and uncopied. Before data is sent, the ranks compare their calls, also for a single
tensor: gloo aborts the process on sizes that differ, and reinterprets bytes of another dtype. The comparison is one
message of one number. Where the data is on an accelerator no rank waits for that message, which would synchronise the
hosts at each metric. Ranks whose calls differ then raise one call later; until then devices may hang, which the report
of hangs shows, or have garbage.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import HOST_DEVICES, Collective, ReduceOp, check_reduce_op
from fabric.strategies.collectives.dtypes import reduction_dtype
from fabric.strategies.collectives.fabric_calls_check import check_call, check_call_later
from fabric.strategies.tensors.nests import map_by_path
from fabric.strategies.tensors.packing import Packing, Spec, check_dense, groups, split_copies

_PADDING = (
    "If lengths differ on purpose, pad each tensor to the length of the longest, "
    "`fabric.all_reduce(torch.tensor(len(tensor)), reduce_op='max')`; for the values of an evaluation's batches use "
    "`fabric.gather_for_metrics(values, loader)`."
)


def all_gather(collective: Collective, data: Any, *, sync_grads: bool = False) -> Any:
    """Return the tensors of all ranks, stacked, in the same containers.

    Ranks: all call it; with `sync_grads` all also call backward through the result.
    Shapes: each tensor `(*S)`, a number `()` -> `(W, *S)`. Dtypes and devices are kept; numbers are float64 or int64.
    Gradient: none; with `sync_grads` each rank receives the gradient of its tensor, summed over ranks.
    Cost: a comparison of one number; then the data.
    Raises: CollectiveError on every rank: the ranks' data differs in paths, dtypes or shapes; TypeError: a leaf is no
    tensor, with its path.
    """
    tensors, specs, call = _described(collective, "all_gather", data, sync_grads=sync_grads)
    _compare(collective, call, specs, advice=_PADDING)
    gathered: dict[int, Tensor] = {}
    if sync_grads:
        traced = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        gathered.update(_gather_traced(collective, tensors, traced))
    rest = [index for index in range(len(tensors)) if index not in gathered]
    waiting = [specs[index] for index in rest]
    together, alone = groups((spec.num_bytes for spec in waiting), (spec.device_type for spec in waiting))
    for members in together:
        indices = [rest[member] for member in members]
        packing = Packing([specs[index] for index in indices])
        rows = collective.all_gather(packing.pack([tensors[index] for index in indices]))
        gathered.update(zip(indices, packing.unpack(rows), strict=True))
    for member in alone:
        gathered[rest[member]] = collective.all_gather(tensors[rest[member]])
    return _put_back(data, gathered)


def all_reduce(collective: Collective, data: Any, op: ReduceOp = "mean") -> Any:
    """Return the elementwise reduction of all ranks' tensors, in the same containers.

    Ranks: all call it. Shapes and dtypes: as `Collective.all_reduce`; a number becomes a tensor `()`.
    Gradient: none.
    Cost: a comparison of one number; then the data.
    Raises: CollectiveError on every rank: the ranks' data differs in paths, dtypes or shapes; TypeError: a leaf is no
    tensor, with its path.
    """
    tensors, specs, call = _described(collective, f"all_reduce with op={op!r}", data, op=op)
    _compare(collective, call, specs)
    reduced: dict[int, Tensor] = {}
    together, alone = groups((each.num_bytes for each in specs), ((each.dtype, each.device_type) for each in specs))
    for indices in together:
        flat = torch.cat([tensors[index].detach().reshape(-1) for index in indices])
        pieces = split_copies(collective.all_reduce(flat, op), [specs[index].num_elements for index in indices])
        reduced.update((index, piece.view(specs[index].shape)) for index, piece in zip(indices, pieces, strict=True))
    for index in alone:
        reduced[index] = collective.all_reduce(tensors[index], op)
    return _put_back(data, reduced)


def _described(
    collective: Collective, operation: str, data: Any, *, sync_grads: bool = False, op: ReduceOp | None = None
) -> tuple[list[Tensor], list[Spec], str]:
    """The tensors in `data`, and the call for `check_call`: their paths, dtypes, shapes and device types.

    `op`: their reduction. Raises the error of this rank's `data`, after all ranks know of it.
    """
    tensors: list[Tensor] = []
    specs: list[Spec] = []
    lines = [f"{operation} with sync_grads" if sync_grads else operation]

    def collect(path: str, tensor: Tensor) -> None:
        check_dense(tensor)
        spec = Spec.of(tensor)
        if op is not None:
            reduction_dtype(spec.dtype, op)
        tensors.append(tensor)
        specs.append(spec)
        lines.append(f"{path}: {spec}{', requires grad' if sync_grads and tensor.requires_grad else ''}")

    try:
        if op is not None:
            check_reduce_op(op)
        map_by_path(collect, data)
    except (TypeError, ValueError) as error:
        # The others raise too, instead of waiting for this rank.
        check_call(collective, f"{lines[0]}, refused: {error}")
        raise
    if data is None:
        lines.append("data: None")
    return tensors, specs, "\n".join(lines)


def _compare(collective: Collective, call: str, specs: Sequence[Spec], *, advice: str = "") -> None:
    """Compare a call over the ranks: before its data is sent from the hosts, or while it is sent between devices."""
    on_host = not specs or any(spec.device_type in HOST_DEVICES for spec in specs)
    (check_call if on_host else check_call_later)(collective, call, advice=advice)


def _put_back(data: Any, results: dict[int, Tensor]) -> Any:
    if isinstance(data, Tensor):
        return results[0]
    in_order: Iterator[Tensor] = (results[index] for index in range(len(results)))
    return map_by_path(lambda path, tensor: next(in_order), data)


def _gather_traced(collective: Collective, tensors: list[Tensor], indices: list[int]) -> dict[int, Tensor]:
    """Differentiable gather: one message, and one in backward, per dtype and device."""
    together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in indices:
        together.setdefault((tensors[index].dtype, tensors[index].device), []).append(index)
    gathered: dict[int, Tensor] = {}
    for members in together.values():
        parts = [tensors[index].reshape(-1) for index in members]
        rows: Tensor = _TracedGather.apply(collective, torch.cat(parts))  # type: ignore[no-untyped-call]
        pieces = rows.split_with_sizes([part.numel() for part in parts], dim=1)
        for index, piece in zip(members, pieces, strict=True):
            gathered[index] = piece.reshape(rows.shape[0], *tensors[index].shape)
    return gathered


class _TracedGather(torch.autograd.Function):
    """The gradient of a rank's tensor is the sum over ranks of the gradients of what they received from it."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, flat: Tensor) -> Tensor:
        ctx.collective = collective
        return collective.all_gather(flat)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.collective.reduce_scatter(gradients[0], "sum")
