"""Train a small GPT on the bytes of Python's standard library, until it writes something like Python.

    python examples/byte_gpt.py --devices 2                    # a few minutes on two CPU cores
    python examples/byte_gpt.py --devices 2 --precision bf16-mixed --compile
    python examples/byte_gpt.py --resume runs/gpt.ckpt --steps 0   # only write

Shapes: B sequences, T bytes in each, D features.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BYTES = 256


class Block(nn.Module):
    """Attention, then an MLP, each added to what comes in."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.merge = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x_btd: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.query_key_value(self.norm_attention(x_btd)).chunk(3, dim=-1)
        ]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x_btd = x_btd + self.merge(seen.transpose(1, 2).flatten(-2))
        return x_btd + self.mlp(self.norm_mlp(x_btd))


class ByteGPT(nn.Module):
    """Bytes `(B, T)` to scores of the next byte `(B, T, 256)`."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(BYTES, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, BYTES, bias=False)
        self.apply(_init)
        self.head.weight = self.byte.weight

    def forward(self, bytes_bt: Tensor) -> Tensor:
        place_td = self.place.weight[: bytes_bt.shape[1]]
        return self.head(self.norm(self.blocks(self.byte(bytes_bt) + place_td)))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
