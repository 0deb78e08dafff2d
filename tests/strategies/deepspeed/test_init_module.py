"""At ZeRO stage 3, models made within `init_module`: their shapes and copies, and what is trained of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from fabric import Fabric

Made = Callable[[], AbstractContextManager[None]]


class Words(nn.Module):
    """`nn.TransformerEncoder` copies its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)))  # type: ignore[no-any-return]


def grouped(model: nn.Module) -> Optimizer:
    """Weight decay of matrices alone, as language models have it."""
    decayed = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    assert sum(each.numel() for each in decayed) == 2 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 11 * 16
    return AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}], lr=0.01)


def train(made: Made, setup: Any, backward: Callable[[Tensor], object]) -> list[float]:
    """Losses of a model beside a frozen copy of it, as preferences are trained."""
    torch.manual_seed(0)
    with made():
        model = Words()
    reference = setup(copy.deepcopy(model).requires_grad_(False))
    model, optimizer = setup(model, grouped(model))
    x, losses = torch.arange(8).view(2, 4), []
    for _ in range(4):
        with torch.no_grad():
            before = reference(x)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()) + (model(x) - before).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def change(fabric: Fabric) -> tuple[bool, str]:
    with fabric.init_module():
        layer = nn.Linear(4, 4)
    try:
        nn.init.normal_(layer.weight)
    except RuntimeError as error:
        return bool(layer.weight.isnan().all()), str(error)
    return False, "nothing"


def in_shards(fabric: Fabric) -> tuple[list[float], bool, str]:
    return train(fabric.init_module, fabric.setup, fabric.backward), *change(fabric)


@pytest.mark.slow
def test_models_have_their_shapes_and_can_be_copied_before_setup() -> None:
    def same(*objects: Any) -> Any:
        return objects if len(objects) > 1 else objects[0]

    expected = train(nullcontext, same, lambda loss: loss.backward())
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="deepspeed_stage_3", sanitize=False)
    found = fabric.launch(in_shards)
    assert found is not None
    losses, is_unread, sentence = found
    assert losses == pytest.approx(expected, rel=1e-4)
    assert is_unread
    assert "single memory location" in sentence  # a change by hand, which DeepSpeed would lose
