"""Averaging of gradients after backward, over the ranks of a collective; gradients times a factor.

# Note [Averages of averages]
All of `.grad` is averaged, including the gradients that have accumulated. A part that was averaged before is equal on
every rank, so averaging does not change it; a part that was not synchronised (`no_backward_sync`) is averaged now. So
accumulation is exact, however synchronised and unsynchronised backwards alternate.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from fabric.strategies.collectives.collective import HOST_DEVICES, Collective
from fabric.strategies.tensors.dtensor import as_sharded, local_part
from fabric.strategies.tensors.packing import exchange

Factor: TypeAlias = float | Tensor
"""A number, or a tensor without dimensions, whose value is not copied to the host."""

_SINGLE_BYTES = 4


NONE, DENSE, SPARSE = range(3)


def kind_of(gradient: Tensor | None) -> int:
    """NONE, DENSE or SPARSE. Ranks exchange this before they exchange gradients."""
    if gradient is None:
        return NONE
    return DENSE if gradient.layout == torch.strided else SPARSE


def refuse_sparse(parameters: Sequence[Tensor], kinds: Sequence[int]) -> None:
    """Raise RuntimeError if a parameter has a sparse gradient. `kinds`: the maximum over all ranks."""
    for parameter, kind in zip(parameters, kinds, strict=True):
        if kind == SPARSE:
            raise RuntimeError(
                f"A gradient of shape {tuple(parameter.shape)} is sparse, and ranks average dense ones here. Make the "
                "layer with `sparse=False`, or pass `strategy='ddp'`, which averages both."
            )


@torch.no_grad()
def average(collective: Collective, parameters: Iterable[Tensor]) -> None:
    """Average the gradients over the ranks, in place. A rank without a gradient counts as zero.

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


def scale_gradients(parameters: Iterable[Tensor], factor: Factor) -> None:
    """Multiply the gradients of the trained parameters, or this rank's shards of them."""
    multiply([grad for each in parameters if (grad := each.grad) is not None and each.requires_grad], factor)


@torch.no_grad()
def multiply(tensors: Iterable[Tensor], factor: Factor) -> None:
    """Multiply tensors, or this rank's shards, of any dtypes in place, each product rounded once."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        part = each if type(each) is Tensor else local_part(each)
        alike.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), parts in alike.items():
        if dtype.itemsize < _SINGLE_BYTES:  # torch would round the factor to 16 bits as well: `_foreach_mul_`, `mul_`
            wide = torch.as_tensor(factor, device=device) if isinstance(factor, Tensor) else factor
            for part in parts:
                part.copy_(part.float().mul_(wide))
        elif isinstance(factor, Tensor) or device.type == "cpu":  # which would convert a number for each gradient
            torch._foreach_mul_(parts, torch.as_tensor(factor, dtype=dtype.to_real(), device=device))
        else:
            torch._foreach_mul_(parts, factor)
