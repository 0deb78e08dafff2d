"""The bytes that `fabric.weights` has on a device beside the shard: less than two buckets."""

import pytest
import torch
from torch import nn
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World

TENSOR_BYTES = 2**20


def peak(world: World, strategy: str, bucket_bytes: int) -> float:
    """In units of the larger one, a bucket or a tensor."""
    with Fabric(accelerator="cuda", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        model = fabric.setup_module(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16))))
        read_all(fabric, model, bucket_bytes)  # what is kept from a first use
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        read_all(fabric, model, bucket_bytes)
        found = torch.cuda.max_memory_allocated() - before
        assert torch.cuda.memory_allocated() == before
        return found / max(bucket_bytes, TENSOR_BYTES)


def read_all(fabric: Fabric, model: nn.Module, bucket_bytes: int) -> None:
    for _, _tensor in fabric.weights(model, bucket_bytes=bucket_bytes):
        pass


# A bucket, a quarter of it as it is received, half of that as it is packed by one of two ranks, and the tensor that the
# loop still has, a quarter of a bucket, or a whole one.
@pytest.mark.parametrize(
    ("strategy", "bucket_bytes", "buckets"),
    [("fsdp", 4 * TENSOR_BYTES, 1.625), ("fsdp", 1, 2.375), ("ddp", 4 * TENSOR_BYTES, 1.25)],
)
def test_a_rank_has_one_bucket_and_one_message_beside_its_shard(
    strategy: str, bucket_bytes: int, buckets: float
) -> None:
    assert run_world(2, peak, strategy, bucket_bytes) == [buckets, buckets]
