"""Token batches, the largest batch size and offloaded activations over torch_xla: right, or refused in words."""

from typing import Any

import pytest
import torch
from cpu_replicas import launch_replicas
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from fabric import Fabric, token_batches
from fabric.strategies.xla.replicas import XLAStrategy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def train(fabric: Fabric) -> tuple[int, list[int], list[int]]:
    """A size that was looked for, the samples of an epoch of packed batches, and which steps changed the weights."""
    texts = [{"input_ids": torch.full((n % 7 + 1,), n), "labels": torch.full((n % 7 + 1,), n % 5)} for n in range(48)]
    samples = [{**text, "number": number} for number, text in enumerate(texts)]
    model = nn.Embedding(48, 5)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))

    def run(batch_size: int) -> None:
        if batch_size > 5 + fabric.global_rank:
            raise MemoryError
        fabric.backward(model(torch.zeros(batch_size, dtype=torch.long, device=fabric.device)).sum())

    size = fabric.find_batch_size(run, start=2)
    read: list[int] = []
    loader = token_batches(samples, 16, pack=True)
    for batch in fabric.setup_dataloaders(loader):
        logits = model(batch["input_ids"])
        fabric.backward(cross_entropy(logits, batch["labels"], reduction="sum"), weight=len(batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
        read += batch["number"].tolist()
    everyone: list[list[int]] = fabric.collective.all_gather_object(read)
    return size, sorted(number for each in everyone for number in each), [len(each) for each in everyone]


def test_replicas_read_each_sample_once_in_batches_of_tokens_and_agree_on_a_batch_size() -> None:
    fabric = Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=2)
    for size, samples, per_rank in launch_replicas(fabric, train):
        assert size == 5
        assert samples == list(range(48))
        assert min(per_rank) > 10


def test_activations_are_not_offloaded() -> None:
    strategy: Any = XLAStrategy(cpu_replicas=True, activation_offload="blocks")
    with pytest.raises(ValueError, match="`activation_offload` with `accelerator='xla'`"):
        Fabric(accelerator="xla", strategy=strategy, devices=2)
