"""Context parallelism: each rank along the axis "context" holds some positions of every sequence of its batch.

For sequences whose activations do not fit into the memory of one rank. Layers other than attention compute each
position separately, and need no change. Attention all-gathers keys and values, and reduce-scatters their gradients;
queries and attention weights remain sharded. torch's own `context_parallel` does not run on a CPU.

    tokens, positions = (context_slice(each, mesh["context"]) for each in (tokens, positions))
    ...
    attended = context_attention(query, key, value, mesh["context"], is_causal=True)

The mesh is that of `parallelize_fn(model, mesh)`, which may store it on the modules. The loss is the mean over this
rank's positions, since all ranks have equally many; gradients are averaged along the axis as along the data axes.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def context_slice(tensor: Tensor, mesh: "DeviceMesh", dim: int = 1) -> Tensor:
    """This rank's positions, of all positions along `dim`: `(..., S, ...)` -> `(..., S / C, ...)`.

    `mesh`: `mesh["context"]`, of C ranks. Rank r has the positions from `r * S / C`. No communication; differentiable.
    Raises: ValueError: S is not divisible by C.
    """
    size, length = mesh.size(), tensor.shape[dim]
    if length % size:
        raise ValueError(
            f"`context_slice` of {length} positions (dim {dim} of a tensor of shape {tuple(tensor.shape)}) over "
            f"{size} ranks, which must have equally many. Pad or cut the sequences to a multiple of {size}."
        )
    return tensor.narrow(dim, mesh.get_local_rank() * (length // size), length // size)


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: "DeviceMesh",
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of this rank's queries over the keys and values of all ranks.

    `mesh`: `mesh["context"]`, of C ranks. Ranks: all along it call it, each with its own positions, and its backward.
    Shapes: `(B, H, S / C, E)` each -> `(B, H, S / C, E)`; positions as `context_slice` gives them.
    Cost: keys and values of all S positions on each rank, and, if causal, a mask of S / C times S.
    """
    size, length = mesh.size(), query.shape[-2]
    if size == 1:
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    mask = None
    if is_causal:
        positions = torch.arange(size * length, device=query.device)
        mask = positions <= context_slice(positions, mesh, dim=0).unsqueeze(1)
    return scaled_dot_product_attention(
        query, _of_all(key, mesh), _of_all(value, mesh), attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )


def _of_all(part: Tensor, mesh: "DeviceMesh") -> Tensor:
    """All-gather the positions of all ranks, in order. Backward reduce-scatters their gradients."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    cut = DTensor.from_local(part, mesh, [Shard(part.ndim - 2)], run_check=False)
    gathered = cut.redistribute(placements=[Replicate()])
    return gathered.to_local(grad_placements=[Partial()])
