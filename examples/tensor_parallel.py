"""Train a small GPT with tensor parallelism and FSDP2: each rank has a shard of some heads and features.

    python examples/tensor_parallel.py --devices 2 --tensor 2
    python examples/tensor_parallel.py --devices 8 --tensor 2 --shard 2 --data 2

Shapes: B sequences, T bytes in each, D features.
"""

import argparse
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy

NUM_BYTES, CONTEXT, DIM, HEAD_DIM = 256, 64, 64, 16


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection. The number of heads is inferred from the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.merge, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x_btd: Tensor) -> Tensor:
        normed = self.norm_attention(x_btd)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_btd = x_btd + self.merge(seen.transpose(1, 2).flatten(-2))
        return x_btd + self.down(F.gelu(self.up(self.norm_mlp(x_btd))))


class GPT(nn.Module):
    """Bytes `(B, T)` to logits of the next byte `(B, T, 256)`."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(NUM_BYTES, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(DIM, NUM_BYTES, bias=False)

    def forward(self, bytes_bt: Tensor) -> Tensor:
        return self.head(self.blocks(self.byte(bytes_bt) + self.place.weight[: bytes_bt.shape[1]]))


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallel over heads and features of every block, then `fully_shard` along the shard axis."""
    from torch.distributed.fsdp import fully_shard  # these take a second to import
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel() for name in ("merge", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--accelerator", "--devices"):
        parser.add_argument(option, default="auto")
    for option, default in (("--tensor", 1), ("--shard", 1), ("--data", 1), ("--steps", 200), ("--batch-size", 16)):
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args()
    strategy = ModelParallelStrategy(parallelize_fn=parallelize, tensor=args.tensor, shard=args.shard, data=args.data)
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(1)

    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)
    order = torch.Generator().manual_seed(1)  # the same batches however the model is split
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(windows), args.batch_size, shuffle=True, generator=order)
    )
    model = GPT()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    for step, (bytes_bt,) in enumerate(islice(loader, args.steps), start=1):
        scores = model(bytes_bt[:, :-1].long())
        loss = F.cross_entropy(scores.flatten(0, 1), bytes_bt[:, 1:].flatten().long())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)  # over all ranks
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            fabric.print(f"step {step}: {fabric.all_reduce(loss.detach()).item():.4f} nats per byte")


if __name__ == "__main__":
    main()
