"""Token batches, batch sizes, offloaded activations and loggers over torch_xla: right, or refused in words."""

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


def train(fabric: Fabric) -> tuple[list[int], list[int]]:
    """The samples of an epoch of packed batches, and how many of them each rank has read."""
    texts = [{"input_ids": torch.full((n % 7 + 1,), n), "labels": torch.full((n % 7 + 1,), n % 5)} for n in range(48)]
    samples = [{**text, "number": number} for number, text in enumerate(texts)]
    model = nn.Embedding(48, 5)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="over XLA, which records a trial and runs it later: try each size"):
        fabric.find_batch_size(lambda size: pytest.fail(f"size {size} is tried"))
    read: list[int] = []
    loader = token_batches(samples, 16, pack=True)
    for batch in fabric.setup_dataloaders(loader):
        logits = model(batch["input_ids"])
        fabric.backward(cross_entropy(logits, batch["labels"], reduction="sum"), weight=len(batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
        read += batch["number"].tolist()
    everyone: list[list[int]] = fabric.collective.all_gather_object(read)
    return sorted(number for each in everyone for number in each), [len(each) for each in everyone]


def test_replicas_read_each_sample_once_in_batches_of_tokens_and_look_for_no_batch_size() -> None:
    fabric = Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=2)
    for samples, per_rank in launch_replicas(fabric, train):
        assert samples == list(range(48))
        assert min(per_rank) > 10


def log(fabric: Fabric) -> None:
    fabric.get_logger("program").warning("once")
    fabric.get_logger("program", all_ranks=True).warning("each")


def test_replica_zero_logs_and_others_on_request_with_their_rank(caplog: pytest.LogCaptureFixture) -> None:
    launch_replicas(Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=2), log)
    seen = [(vars(each)["rank"], each.getMessage()) for each in caplog.records if each.name == "program"]
    assert sorted(seen) == [(0, "each"), (0, "once"), (1, "each")]


def test_activations_are_not_offloaded() -> None:
    strategy: Any = XLAStrategy(cpu_replicas=True, activation_offload="blocks")
    with pytest.raises(ValueError, match="`activation_offload` with `accelerator='xla'`"):
        Fabric(accelerator="xla", strategy=strategy, devices=2)
