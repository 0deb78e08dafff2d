"""Check that plain tensors are equal on all ranks; otherwise they can be neither saved nor clipped as replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.digest import numbers_of

_TOLERANCE = 1e-3
"""Relative, of norms. Ranks may sum equal gradients in another order; those of other samples differ by more."""


def refuse_differing(collective: Collective, tensors: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError, on every rank, unless the ranks have the same plain tensors, bit for bit.

    Ranks: all call it. Cost: reads each tensor once; one wait for the device, and one gather of a number for each.
    """
    digests = collective.all_gather_object(dict(zip(tensors, numbers_of(tensors.values()), strict=True)))
    names = list(dict.fromkeys(name for of_rank in digests for name in of_rank))
    differing = [name for name in names if any(of_rank.get(name) != digests[0].get(name) for of_rank in digests)]
    if differing:
        raise RuntimeError(
            f"{differing[0]} differs between the ranks, and is no DTensor: a checkpoint would hold only rank 0's. "
            "If each rank has a shard, make it a DTensor (`context.shard`, or your own). If it is a replica, start "
            "from the same values and average the gradients (`Parallelized(averaged=...)`)."
        )


def refuse_unequal_gradients(collective: Collective, parameters: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError, on every rank, if the ranks have different gradients of the same plain parameters.

    Ranks: all call it. Cost: a norm of each gradient, and one all-reduce of four numbers.
    """
    norms = torch.stack([_norm(parameter) for parameter in parameters.values()]) if parameters else torch.zeros(1)
    places = torch.arange(1, len(norms) + 1, device=norms.device)  # weighted: swapped gradients differ too
    mine = torch.stack([norms.new_tensor(len(parameters)), (norms * places).sum()])
    highest, lowest = collective.all_reduce(torch.stack([mine, -mine]), "max")
    if torch.allclose(highest, -lowest, rtol=_TOLERANCE, atol=0.0):
        return
    of_ranks = collective.all_gather_object(dict(zip(parameters, norms.tolist(), strict=False)))
    names = list(dict.fromkeys(name for of_rank in of_ranks for name in of_rank))
    norms_of = {name: [of_rank.get(name, -1.0) for of_rank in of_ranks] for name in names}
    name = max(names, key=lambda name: max(norms_of[name]) / max(min(norms_of[name]), 1e-30))
    raise RuntimeError(
        f"The gradient of `{name}` differs between the ranks, and is no DTensor: each rank would clip by another norm "
        f"(of this one: {', '.join(f'{norm:.4g}' for norm in norms_of[name])}; -1 is none). If each rank has a "
        "shard, make it a DTensor (`context.shard`, or your own). If it is a replica, average the gradients "
        "(`Parallelized(averaged=...)`)."
    )


def _norm(parameter: Tensor) -> Tensor:
    """The norm of the gradient, -1 if there is none. NaN becomes infinite, so that the all-reduce can compare it."""
    if parameter.grad is None:
        return torch.tensor(-1.0, device=parameter.device)
    wide = torch.promote_types(parameter.grad.dtype, torch.float32)  # a square overflows in half precision
    norm: Tensor = torch.linalg.vector_norm(parameter.grad.detach(), dtype=wide)
    return norm.float().nan_to_num(math.inf, math.inf)
