"""Gradients that travel by a hook are what the hook makes of them, computed by hand on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR, only_on_accelerators, only_on_cpu
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.optim import SGD

from fabric import Fabric
from fabric.strategies import DDPStrategy
from fabric.strategies.accelerators.accelerator import CPUAccelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.ddp.comm_hooks import PowerSGD

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def ranks(size: int = 2, precision: Any = "32-true", **options: Any) -> Fabric:
    strategy = DDPStrategy(**options)
    return Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=size, launcher="forkserver", precision=precision)


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(ACCELERATOR)


def gradients(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    return list(torch.autograd.grad(model(batch(rank, step)).square().sum(), list(model.parameters())))


def follow(fabric: Fabric) -> tuple[list[Tensor], list[list[list[Tensor]]]]:
    """The averages of three steps as they came, and each rank's own gradients of the same weights."""
    model = make()
    plain = make().to(ACCELERATOR)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.01))
    came, own = [], []
    for step in range(3):
        plain.load_state_dict(model.state_dict())
        own.append([gradients(plain, rank, step) for rank in range(fabric.world_size)])
        optimizer.zero_grad()
        with fabric.no_backward_sync(model):
            fabric.backward(model(batch(fabric.global_rank, step)).square().sum() / 2)
        fabric.backward(model(batch(fabric.global_rank, step)).square().sum() / 2)
        came.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    for of_ranks in fabric.all_gather([gradient for step in came for gradient in step]):
        assert torch.equal(of_ranks, of_ranks[:1].expand_as(of_ranks))
    return came, own


@pytest.mark.slow
@pytest.mark.parametrize("word", DTYPES)
def test_gradients_are_averages_of_what_each_rank_rounded(word: str) -> None:
    result = ranks(comm_hook=word, bucket_bytes=400).launch(follow)  # several buckets
    assert result is not None
    for came, own in zip(*result, strict=True):
        for gradient, *each in zip(came, *own, strict=True):
            rounded = [one.to(DTYPES[word]).div(2) for one in each]
            # Of two addends, one sum in half precision: to the last bit what is computed by hand.
            torch.testing.assert_close(gradient, (rounded[0] + rounded[1]).float(), rtol=0, atol=0)
            assert not torch.equal(gradient, torch.stack(each).mean(0))


def custom(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The annotations are strings here, which torch's own check refuses. Averages, and doubles."""
    summed = bucket.buffer() * 2 / dist.get_world_size()
    return dist.all_reduce(summed, async_op=True).get_future().then(lambda future: future.value()[0])


def with_options(fabric: Fabric) -> Any:
    came, own = follow(fabric)
    return came, [[torch.stack(each).mean(0) for each in zip(*step, strict=True)] for step in own]


@pytest.mark.slow
def test_a_hook_of_the_users_and_one_of_torch_decide_what_gradients_are() -> None:
    came, means = ranks(comm_hook=custom).launch(with_options) or ([], [])
    assert len(came) == 3
    torch.testing.assert_close(came, [[2 * mean for mean in step] for step in means])
    came, means = ranks(comm_hook=fp16_compress_hook).launch(with_options) or ([], [])
    torch.testing.assert_close(came, means, rtol=2e-3, atol=2e-3)
    assert not torch.equal(came[0][0], means[0][0])


@pytest.mark.slow
@only_on_accelerators("PowerSGD is refused over gloo")
def test_power_sgd_sends_whole_gradients_first_and_factors_of_low_rank_then() -> None:
    hook = PowerSGD(matrix_approximation_rank=1, start_step=2, min_compression_rate=1.0)
    came, means = ranks(1, comm_hook=hook).launch(with_options) or ([], [])
    torch.testing.assert_close(came[:2], means[:2])
    assert torch.linalg.matrix_rank(came[2][0]) == 1
    assert torch.linalg.matrix_rank(means[2][0]) > 1
    hook = PowerSGD(matrix_approximation_rank=1, start_step=2, min_compression_rate=100.0)  # nothing shrinks so much
    came, means = ranks(1, comm_hook=hook).launch(with_options) or ([], [])
    torch.testing.assert_close(came, means)


@only_on_cpu("over gloo a hook is refused that NCCL runs")
def test_an_unsupported_comm_hook_raises_in_the_constructor() -> None:
    with pytest.raises(ValueError, match=r"`comm_hook='int8'` names no hook\. Write 'bf16' or 'fp16'"):
        DDPStrategy(comm_hook="int8")  # type: ignore[arg-type]
    for size in (1, 2):
        with pytest.raises(ValueError, match=r"over gloo ends the process.*Run on CUDA"):
            ranks(size, comm_hook=PowerSGD())
    assert (
        DDPStrategy(comm_hook=PowerSGD(), backend="nccl").refuse(Target(accelerator=CPUAccelerator(), num_devices=2))
        is None
    )
