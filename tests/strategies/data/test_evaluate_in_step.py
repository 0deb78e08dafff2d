"""Evaluation under strategies whose forward waits for all ranks, of data in different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies.manual.strategy import ManualContext, ManualStrategy
from fabric.strategies.model_parallel.strategy import ModelParallelStrategy

SAMPLES = 11


class Stream(IterableDataset[Tensor]):
    """The samples; of two parts, the first has three and the second the rest."""

    def __init__(self, part: range = range(SAMPLES)) -> None:
        self.part = part

    def __iter__(self) -> Iterator[Tensor]:
        return (sample(number) for number in self.part)


class Parts(Stream):
    def shard(self, num_shards: int, index: int) -> Stream:
        assert num_shards == 2
        return Stream(range(3) if index == 0 else range(3, SAMPLES))


def sample(number: int) -> Tensor:
    return torch.full((4,), float(number))


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh["shard"])


def shard_over_all(model: nn.Module, context: ManualContext) -> nn.Module:
    return fully_shard(model, mesh=context.mesh)


STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "model_parallel": ModelParallelStrategy(parallelize_fn=shard, shard=2),
    "manual": ManualStrategy(parallelize=shard_over_all),
    "ddp_fully_sharded": "ddp_fully_sharded",
    "deepspeed_stage_3": "deepspeed_stage_3",
}


def loaders(fabric: Fabric, rank: int, uneven: Any) -> dict[str, Any]:
    """Evaluation loaders of which one rank has more batches than the other."""
    samples = [sample(number) for number in range(SAMPLES)]
    batches = [torch.stack(samples[start : start + 4]) for start in range(0, SAMPLES, 4)]
    options: Any = {"use": "validate", "uneven": uneven}
    batched: Any = DataLoader(samples, 1)  # type: ignore[arg-type]
    with_workers: Any = DataLoader(Parts(), 4, num_workers=1)
    return {
        "samples": fabric.setup_dataloaders(batched, **options),
        "stream": fabric.setup_dataloaders(DataLoader(Parts(), 4), **options),
        "stream by workers": fabric.setup_dataloaders(with_workers, **options),
        "batches": fabric.setup_dataloaders(batches, **options),
    }


def evaluate(fabric: Fabric, model: Any, loader: Any) -> tuple[list[float], int]:
    outputs, count = [], 0
    with torch.no_grad():
        for batch in loader:
            outputs.append(model(batch))
            if not loader.iteration.repeats:
                count += len(batch)
    gathered = sorted(fabric.gather_for_metrics(outputs, loader)[:, 0].tolist())
    return gathered, int(fabric.all_reduce(float(count), reduce_op="sum"))


def in_every_way(world: World, strategy: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Fabric(accelerator=ACCELERATOR, strategy=STRATEGIES[strategy], launcher="external") as fabric:
        fabric.launch()
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.25)
        model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        model.eval()
        for uneven in ("repeat", None):
            for name, loader in loaders(fabric, world.rank, uneven).items():
                try:
                    found[f"{name}, {uneven}"] = evaluate(fabric, model, loader)
                except RuntimeError as error:
                    found[f"{name}, {uneven}"] = str(error)
        fabric.barrier()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_fewer_batches_to_evaluate_repeat_their_last_or_all_raise_and_never_wait(strategy: str) -> None:
    first, second = run_world(2, in_every_way, strategy)
    expected = [float(number) for number in range(SAMPLES)], SAMPLES
    assert first == second
    for name, found in first.items():
        if name.endswith("repeat") or strategy == "ddp":
            assert found == (pytest.approx(expected[0]), expected[1]), name
        else:
            assert "has different numbers of batches: " in found, name
            assert "With this strategy a forward waits for all ranks" in found, name
            assert 'Pass `setup_dataloaders(..., uneven="repeat")`' in found, name
