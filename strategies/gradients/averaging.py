"""Averaging of gradients after backward, over the ranks of a collective.

# Note [Averages of averages]
All of `.grad` is averaged, including what has accumulated. A part that was averaged before is equal on every rank, so
averaging does not change it; a part that was not synchronised (`no_backward_sync`) is averaged now. So accumulation is
exact, however synchronised and unsynchronised backwards alternate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from fabric.strategies.collectives.collective import HOST_DEVICES, Collective
from fabric.strategies.gradients.clipping import DENSE, NONE, kind_of, refuse_sparse
from fabric.strategies.tensors.dtensor import as_sharded, local_part
from fabric.strategies.tensors.packing import exchange


@torch.no_grad()
def average(collective: Collective, parameters: Iterable[Tensor]) -> None:
    """Average the gradients over the ranks, in place. If only some ranks have one, the others count as zero.

    See Note [Averages of averages]. Ranks: all of `collective`, with the same parameters, or the same shards of them.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    present = _present_anywhere(collective, trainable)
    gradients = [local_part(each.grad) for each in present if each.grad is not None]
    exchange(gradients, partial(collective.all_reduce, op="mean"))


@torch.no_grad()
def redistribute(parameters: Sequence[nn.Parameter]) -> None:
    """Redistribute gradients to the placements of their parameters. Ranks: all that hold a part of them.

    A replicated parameter may get a partial gradient (`Partial`) from backward: for example that of a norm whose input
    is sharded along the sequence.
    """
    for parameter in parameters:
        gradient, layout = as_sharded(parameter.grad), as_sharded(parameter)
        if gradient is not None and layout is not None and gradient.placements != layout.placements:
            parameter.grad = cast(Tensor, gradient.redistribute(placements=layout.placements))


def _present_anywhere(collective: Collective, parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters with a gradient on any rank; this rank gets zeros if it has none.

    On an accelerator, only a rank that lacks a gradient waits for the device. Raises: RuntimeError: a gradient is
    sparse on any rank, before anything is sent; on an accelerator, where all gradients of a rank are dense, on others.
    """
    parameters = list(parameters)
    if not parameters:
        return []
    kinds, device = [kind_of(parameter.grad) for parameter in parameters], parameters[0].device
    if device.type not in HOST_DEVICES and set(kinds) == {DENSE}:  # present, whatever the other ranks have
        anywhere = kinds
        collective.all_reduce(torch.full((len(kinds),), DENSE, dtype=torch.int8, device=device), "max")
    else:
        mine = torch.tensor(kinds, dtype=torch.int8, device="cpu" if device.type in HOST_DEVICES else device)
        anywhere = collective.all_reduce(mine, "max").tolist()
    present = [parameter for parameter, kind in zip(parameters, anywhere, strict=True) if kind != NONE]
    refuse_sparse(parameters, anywhere)
    for parameter in present:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return present
