"""Train a small GPT on the bytes of Python's standard library, and sample from it.

    python examples/byte_gpt.py --devices 2
    python examples/byte_gpt.py --devices 2 --precision bf16-mixed --compile
    python examples/byte_gpt.py --devices 2 --strategy model_parallel     # or any other strategy
    python examples/byte_gpt.py --resume runs/byte_gpt.ckpt --steps 0     # only samples

Shapes: B sequences, T bytes in each, D features.
"""

import argparse
import math
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from fabric import CSVLogger, Fabric
from fabric.strategies import ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized

NUM_BYTES = 256


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.merge = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x_btd: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.query_key_value(self.norm_attention(x_btd)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_btd = x_btd + self.merge(seen.transpose(1, 2).flatten(-2))
        return x_btd + self.mlp(self.norm_mlp(x_btd))


class ByteGPT(nn.Module):
    """Bytes `(B, T)` to logits of the next byte `(B, T, 256)`."""

    def __init__(self, context: int, dim: int = 128, num_layers: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(NUM_BYTES, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, NUM_BYTES, bias=False)
        self.apply(small_weights)
        self.head.weight = self.byte.weight

    def forward(self, bytes_bt: Tensor) -> Tensor:
        place_td = self.place.weight[: bytes_bt.shape[1]]
        return self.head(self.norm(self.blocks(self.byte(bytes_bt) + place_td)))


class Windows(Dataset[Tensor]):
    """Windows of `context` bytes of a text, with the next byte of each position."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes, self.context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.bytes[start : start + self.context + 1].long()


def small_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def in_shards(model: nn.Module, mesh: DeviceMesh) -> None:
    """For `model_parallel`: shard each block over the mesh, then the rest of the model."""
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def in_replicas(model: nn.Module, context: ManualContext) -> Parallelized:
    """For `manual`: a replica on every rank, with averaged gradients."""
    return Parallelized(module=model.to(context.device), averaged=model)


STRATEGIES = {
    "manual": ManualStrategy(parallelize=in_replicas),
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard="auto"),
}
"""Strategies that need a function which parallelises the model. Others are passed by name."""


def standard_library() -> bytes:
    """The source of the modules at the top of Python's standard library, about 5 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def loss_of(model: nn.Module, bytes_bt: Tensor) -> Tensor:
    """The cross entropy, in nats per byte."""
    scores = model(bytes_bt[:, :-1]).float()
    return F.cross_entropy(scores.flatten(0, 1), bytes_bt[:, 1:].flatten())


def validate(fabric: Fabric, model: nn.Module, loader: DataLoader) -> float:
    """Nats per byte over all windows of the loader, each counted once, over all ranks."""
    model.eval()
    sums = torch.zeros(2, device=fabric.device)
    with torch.no_grad():
        for bytes_bt in loader:
            sums += torch.stack([loss_of(model, bytes_bt) * len(bytes_bt), sums.new_tensor(len(bytes_bt))])
    model.train()
    nats, count = fabric.all_reduce(sums, reduce_op="sum")
    return (nats / count).item()


def write(fabric: Fabric, model: nn.Module, start: str, num_bytes: int, context: int) -> str:
    """Sample a continuation of `start`, byte by byte."""
    text = torch.tensor([list(start.encode())], device=fabric.device)
    model.eval()
    with torch.no_grad():
        for _ in range(num_bytes):
            chances = torch.softmax(model(text[:, -context:])[:, -1].float() / 0.8, dim=-1)
            text = torch.cat([text, torch.multinomial(chances, 1)], dim=1)
    model.train()
    return bytes(text[0].tolist()).decode(errors="replace")


def endless(loader: DataLoader) -> Iterator[Tensor]:
    while True:
        yield from loader


def main() -> None:
    args = arguments()
    fabric = Fabric(
        accelerator=args.accelerator,
        strategy=STRATEGIES.get(args.strategy, args.strategy),
        devices=args.devices,
        precision=args.precision,
        loggers=CSVLogger(args.log) if args.log else (),
    )
    nats = fabric.launch(train, args)
    if args.below is not None and not nats < args.below:
        raise SystemExit(f"{nats:.3f} nats per byte is not below {args.below}.")


def train(fabric: Fabric, args: argparse.Namespace) -> float:
    """Train and sample, on every rank. Returns the final nats per byte of held-out text."""
    fabric.seed_everything(args.seed)
    text = standard_library()
    cut = len(text) * 95 // 100
    unseen = Windows(text[cut:], args.context)
    order = torch.Generator().manual_seed(args.seed)  # the same batches for every number of ranks
    learn_loader = DataLoader(Windows(text[:cut], args.context), args.batch_size, shuffle=True, generator=order)
    every = len(unseen) // args.unseen
    test_loader = DataLoader(Subset(unseen, range(0, every * args.unseen, every)), args.batch_size)
    model = ByteGPT(args.context, args.dim, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / max(1, args.steps)))
    )
    if args.compile:
        model = torch.compile(model)
    model, optimizer = fabric.setup(model, optimizer)
    learn_loader = fabric.setup_dataloaders(learn_loader)
    test_loader = fabric.setup_dataloaders(test_loader, use="validate")
    if args.resume:
        fabric.load(args.resume, {"model": model})

    batches = enumerate(islice(endless(learn_loader), args.steps), start=1)
    for step, bytes_bt in fabric.progress(batches, "steps", total=args.steps):
        optimizer.zero_grad()
        loss = loss_of(model, bytes_bt)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
        if args.log:
            fabric.log("nats", fabric.all_reduce(loss.detach()), step)
        if step % args.validate_every == 0:
            fabric.print(f"step {step}: {validate(fabric, model, test_loader):.3f} nats per unseen byte")

    nats = validate(fabric, model, test_loader)
    fabric.print(f"{nats:.3f} nats per unseen byte\n")
    fabric.print(write(fabric, model, "def ", args.write, args.context))
    if args.save:
        fabric.save(args.save, {"model": model, "optimizer": optimizer, "steps": args.steps})
    return nats


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--accelerator", "--strategy", "--devices"):
        parser.add_argument(option, default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model looks back on")
    parser.add_argument("--dim", type=int, default=128, help="features")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--log", help="a folder for the loss of every step, as CSV")
    parser.add_argument("--validate-every", type=int, default=200)
    parser.add_argument("--unseen", type=int, default=400, help="windows to validate on")
    parser.add_argument("--write", type=int, default=400, help="bytes to write at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", help="where to write a checkpoint")
    parser.add_argument("--resume", help="a checkpoint to begin from")
    parser.add_argument("--below", type=float, help="fail if the loss at the end is not below this many nats")
    return parser.parse_args()


if __name__ == "__main__":
    main()
