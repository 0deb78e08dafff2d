"""`auto_wrap_policy="blocks"`: what repeats in a model and holds its parameters is sharded one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn

from fabric import Fabric
from fabric.strategies import FSDPStrategy, blocks_of


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class GPT(nn.Module):
    """Has a head that is tied to its embedding."""

    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(num))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        output = self.head(x)
        assert isinstance(output, Tensor)
        return output


class NamesItsBlocks(nn.Module):
    """As models of transformers do."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = Block(), nn.Sequential(nn.Linear(8, 8), Block())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Block(), Block()])) for _ in range(2))


def tied_blocks() -> nn.Module:
    model = GPT()
    model.blocks[1].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    return model


def small_heads() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 8), nn.ModuleList([Block(2), Block(2)]))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (GPT(), ["blocks.0", "blocks.1", "blocks.2"]),
        (
            nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16, batch_first=True),
            [*(f"encoder.layers.{i}" for i in range(2)), *(f"decoder.layers.{i}" for i in range(2))],
        ),
        (NamesItsBlocks(), ["first", "rest.1"]),
        (Experts(), ["layers.0", "layers.1"]),
        (tied_blocks(), ["blocks.2"]),
        (GPT(num=1), []),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []),
        (small_heads(), []),
    ],
    ids=["gpt", "transformer", "named", "experts", "tied", "one block", "layers", "small"],
)
def test_blocks_are_the_outermost_modules_that_repeat_and_hold_the_parameters(
    model: nn.Module, names: list[str]
) -> None:
    of = {part: name for name, part in model.named_modules()}
    assert [of[block] for block in blocks_of(model)] == names
    assert FSDPStrategy().units(model) == names
    assert FSDPStrategy(auto_wrap_policy=None).units(model) == []


def train(fabric: Fabric) -> tuple[list[str], dict[str, Tensor], list[int]]:
    """The units, the weights after three steps, and the largest number of gathered elements in a forward."""
    torch.manual_seed(0)
    model: Any = GPT()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gathered: list[int] = []

    def count(*_: Any) -> None:
        whole = [each for each in model.parameters() if not hasattr(each, "placements")]
        gathered.append(sum(each.numel() for each in whole))

    for block in model.blocks:
        block.up.register_forward_hook(count)
    for step in range(3):
        fabric.backward(model(torch.arange(4).view(1, 4) + step).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return fabric.strategy.units(model), fabric.state_dict(model), gathered  # type: ignore[attr-defined]


@pytest.mark.slow
def test_fsdp_gathers_one_block_at_a_time_by_default_and_trains_as_one_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    plain = GPT()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        plain(torch.arange(4).view(1, 4) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    units, weights, gathered = Fabric(
        accelerator=ACCELERATOR, devices=2, strategy="fsdp", launcher="forkserver", sanitize=False
    ).launch(train)
    assert units == ["blocks.0", "blocks.1", "blocks.2"]
    block = sum(each.numel() for each in Block().parameters())
    assert max(gathered) < 2 * block
    torch.testing.assert_close(weights, {name: each.detach() for name, each in plain.state_dict().items()})
    heard = capfd.readouterr().err
    assert heard.count("`strategy='fsdp'` gathers the weights of 3 `Block` one at a time, and all others with the") == 1
