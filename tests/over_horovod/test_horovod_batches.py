"""Token batches, the largest batch size and loggers over Horovod; offloaded activations are of devices."""

import logging
from io import StringIO

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from fabric import Fabric, token_batches
from fabric.strategies import HorovodStrategy

pytestmark = pytest.mark.slow


def train(fabric: Fabric) -> tuple[int, list[int], list[str]]:
    """A size that was looked for, where one rank runs out of memory, the samples of an epoch of packed batches, and
    what each rank logs."""
    handler = logging.StreamHandler(StringIO())
    handler.setFormatter(logging.Formatter("%(rank)d %(message)s"))
    logging.getLogger("program").addHandler(handler)
    fabric.get_logger("program").warning("once")
    fabric.get_logger("program", all_ranks=True).warning("each")
    texts = [{"input_ids": torch.full((n % 7 + 1,), n), "labels": torch.full((n % 7 + 1,), n % 5)} for n in range(48)]
    samples = [{**text, "number": number} for number, text in enumerate(texts)]
    model = nn.Embedding(48, 5)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))

    def run(batch_size: int) -> None:
        loss = model(torch.zeros(batch_size, dtype=torch.long)).sum()
        if batch_size > 5 + fabric.global_rank:
            raise MemoryError
        fabric.backward(loss)

    size = fabric.find_batch_size(run, start=2)
    read: list[int] = []
    for batch in fabric.setup_dataloaders(token_batches(samples, 16, pack=True)):
        logits = model(batch["input_ids"])
        fabric.backward(cross_entropy(logits, batch["labels"], reduction="sum"), weight=len(batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
        read += batch["number"].tolist()
    everyone, logged = zip(*fabric.collective.all_gather_object((read, handler.stream.getvalue())), strict=True)
    return size, sorted(number for each in everyone for number in each), list(logged)


def test_ranks_read_each_sample_once_in_batches_of_tokens_and_agree_on_a_size_and_log_with_their_rank() -> None:
    fabric = Fabric(accelerator="cpu", strategy=HorovodStrategy(timeout_seconds=20), devices=2)
    assert fabric.launch(train) == (5, list(range(48)), ["0 once\n0 each\n", "1 each\n"])


def test_activations_are_not_offloaded_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="`activation_offload` with `accelerator='cpu'`"):
        Fabric(accelerator="cpu", strategy=HorovodStrategy(activation_offload="blocks"), devices=2)
