"""Raises in `setup` for embeddings with sparse gradients, which reduce-scatter and flat gradients cannot hold."""

from __future__ import annotations

from torch import nn

from fabric.strategies.tensors.dtensor import as_sharded


def refuse_sparse_layers(strategy: str, module: nn.Module, *, sharded: bool = False) -> None:
    """Raise ValueError if a trained embedding has `sparse=True`. `sharded`: only those whose weight is a DTensor."""
    for name, part in module.named_modules():
        if not (isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad):
            continue
        if sharded and as_sharded(part.weight) is None:
            continue
        place = f"`{name}` of `{type(module).__name__}`" if name else f"The `{type(part).__name__}`"
        raise ValueError(
            f"{place} has `sparse=True`, and `strategy={strategy!r}` reduces dense gradients. Make the layer with "
            "`sparse=False`, and train it by the optimizer of the dense counterpart (Adam for SparseAdam); or pass "
            "`strategy='ddp'`, which averages sparse gradients, too."
        )
