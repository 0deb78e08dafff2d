"""`Fabric(check_replicas=N)`: ranks compare the weights and optimizer states that they have in common."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR
from torch import Tensor, nn

from fabric import Fabric, ReplicasDifferError, WorkerError
from fabric.strategies import FSDPStrategy, Strategy
from fabric.strategies.sharding.dtensor import local_part


def part(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach())


def differences(fabric: Fabric) -> list[str]:
    """What is raised where the last rank has another weight, and where it has another optimizer state."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0))
    parameters = list(model.parameters())

    def step() -> None:
        fabric.backward(model(torch.ones(2, 4) * fabric.global_rank).sum())
        optimizer.step()
        optimizer.zero_grad()

    sentences = []
    for tensor_of in (lambda: part(parameters[2]), lambda: part(optimizer.state[parameters[0]]["exp_avg"])):
        step(), step()  # the second is compared
        own = tensor_of().clone()
        if fabric.global_rank == fabric.world_size - 1:
            tensor_of().data += 1
        step()
        try:
            step()
        except ReplicasDifferError as error:
            sentences.append(str(error))
        dist.barrier()
        tensor_of().data.copy_(own)
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                part(state[name]).zero_()
    return sentences


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), (FSDPStrategy(device_mesh=(2, 2)), 4)], ids=["ddp", "hsdp"])
def test_the_first_difference_is_named_with_the_ranks_and_the_step_since_when(
    strategy: str | Strategy, size: int
) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, check_replicas=2)
    weight, state = fabric.launch(differences)
    ranks = {2: "rank 1 differs from that on rank 0", 4: "rank 3 differs from that on rank 1"}[size]
    assert f"after step 4 of `AdamW`, `1.weight` on {ranks}. They were equal after step 2." in weight
    assert f"after step 8 of `AdamW`, `exp_avg` of `0.weight` in `AdamW` on {ranks}." in state


def drift_after_the_last_comparison(fabric: Fabric) -> None:
    net = nn.Linear(4, 2)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    model.bias.data += fabric.global_rank


@pytest.mark.slow
def test_replicas_are_compared_once_more_at_the_end() -> None:
    with pytest.raises(
        WorkerError, match=r"after step 2 of `SGD`, `bias` on rank 1 differs from that on rank 0\. They "
    ):
        Fabric(accelerator=ACCELERATOR, devices=2, check_replicas=100).launch(drift_after_the_last_comparison)
