"""GRPO with a rollout engine in another job: `python examples/rollout.py --strategy fsdp --devices 2`.

The trainer samples nothing itself. After each step it sends its weights, a bucket at a time, to an engine: a job of two
gloo processes of its own, which generates with them. At the end the weights go to a file of safetensors in pieces.
The task: answer with the token that was asked for, four times.
"""

import argparse
import json
import subprocess
import sys
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fabric import Fabric, seed_everything

NUM_TOKENS, LENGTH, GROUP = 6, 4, 16
PIECE_BYTES = 20_000
ADDRESS = "engine.socket"


class Policy(nn.Module):
    """Reads the tokens so far; the logits of the next one."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, width)
        self.place = nn.Embedding(LENGTH + 1, width)
        layer = (width, 4, 2 * width, 0.0)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(*layer, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


def generate(policy: Policy, prompts: Tensor) -> Tensor:
    """Sampled tokens after the prompts: `(B, 1)` -> `(B, 1 + LENGTH)`."""
    tokens = prompts
    for _ in range(LENGTH):
        following = policy(tokens)[:, -1].softmax(-1).multinomial(1)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


def engine(fabric: Fabric) -> None:
    """The other job: takes weights and prompts from the trainer, and generates with two processes."""
    seed_everything(7)
    policy = fabric.setup_module(Policy()).eval()
    trainer = Client(ADDRESS) if fabric.is_global_zero else None
    while True:
        kind, *content = fabric.broadcast(None if trainer is None else trainer.recv())
        if kind == "weight":
            name, values = content
            with torch.no_grad():
                policy.get_parameter(name).copy_(torch.from_numpy(values))
        elif kind == "prompts":
            mine = torch.from_numpy(content[0]).chunk(fabric.world_size)[fabric.global_rank]
            with torch.no_grad():
                tokens = fabric.all_gather(generate(policy, mine)).flatten(0, 1)
            if trainer is not None:
                trainer.send(tokens.numpy())
        else:
            return


def send_weights(fabric: Fabric, policy: nn.Module, connection: Any) -> None:
    """Rank 0 sends; the other ranks only take part."""
    for name, weight in fabric.weights(policy, torch.float32):
        if connection is not None:
            connection.send(("weight", name, weight.cpu().numpy()))


def export(fabric: Fabric, policy: nn.Module, folder: Path) -> None:
    """Write files of up to `PIECE_BYTES`, and their index, as transformers reads them."""
    from safetensors.torch import save_file

    piece: dict[str, Tensor] = {}
    index: dict[str, str] = {}

    def write() -> None:
        name = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(piece, folder / name)
        index.update(dict.fromkeys(piece, name))
        piece.clear()

    for name, weight in fabric.weights(policy):
        if fabric.is_global_zero:
            if piece and sum(each.nbytes for each in piece.values()) + weight.nbytes > PIECE_BYTES:
                write()
            piece[name] = weight.cpu()
    if fabric.is_global_zero:
        write()
        content = {"metadata": {}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def train(fabric: Fabric, num_steps: int) -> None:
    seed_everything(1)
    policy = Policy()
    policy, optimizer = fabric.setup(policy, torch.optim.AdamW(policy.parameters(), lr=0.003))
    listener = Listener(ADDRESS) if fabric.is_global_zero else None
    job = subprocess.Popen([sys.executable, __file__, "--engine"]) if fabric.is_global_zero else None
    connection = None if listener is None else listener.accept()
    prompts = torch.arange(NUM_TOKENS).repeat_interleave(GROUP)[:, None]
    for step in range(num_steps):
        send_weights(fabric, policy, connection)
        answers = None
        if connection is not None:
            connection.send(("prompts", prompts.numpy()))
            answers = torch.from_numpy(connection.recv())
        tokens = fabric.broadcast(answers)
        rewards = (tokens[:, 1:] == tokens[:, :1]).float().mean(dim=1).view(NUM_TOKENS, GROUP)
        advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

        share = slice(fabric.global_rank, None, fabric.world_size)
        mine, advantage = fabric.to_device((tokens[share], advantages[share]))
        logits = policy(mine[:, :-1])
        losses = cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="none").view(-1, LENGTH)
        fabric.backward((losses * advantage[:, None]).sum(), weight=losses.numel())
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            fabric.print(f"step {step + 1}: mean reward {rewards.mean():.2f}")
    export(fabric, policy, Path())
    if connection is not None and job is not None:
        connection.send(("end",))
        job.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--engine", action="store_true", help="started by the trainer")
    chosen = parser.parse_args()
    if chosen.engine:
        Fabric(accelerator="cpu", devices=2, strategy="ddp").launch(engine)
    else:
        words = {"accelerator": chosen.accelerator, "strategy": chosen.strategy, "devices": chosen.devices}
        Fabric(**words).launch(train, chosen.steps)
