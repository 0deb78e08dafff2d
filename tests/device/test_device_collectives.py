"""Calls of fabric on a device's tensors: they meet no gradients, wait for no host, and land on the rank's device."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from waits import counting

from fabric import Fabric, WorkerError
from fabric.strategies import Route
from fabric.strategies.gradients.clipping import clip_norm


def launch(function: Any, strategy: str = "ddp", **options: Any) -> Any:
    fabric = Fabric(accelerator="cuda", devices=2, strategy=strategy, launcher="forkserver", **options)
    return fabric.launch(function)


def train_after_a_metric_on_rank_zero(fabric: Fabric) -> None:
    net = nn.Linear(1, 1, bias=False)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    loss = model(torch.ones(1, 1, device=fabric.device)).sum()
    if fabric.global_rank == 0:
        fabric.all_reduce(loss.detach().view(1, 1))  # of as many numbers as the gradient
    fabric.backward(loss)
    optimizer.step()
    fabric.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("ddp", "did not make the same call, and would wait"),
        # Rank 1 waits for the device, not in a call: it could still make another one.
        ("fsdp", "A collective on the accelerator has waited for all of its `timeout_seconds`"),
    ],
)
def test_a_metric_on_one_rank_alone_is_not_matched_with_gradients(strategy: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words) as raised:
        launch(train_after_a_metric_on_rank_zero, strategy, report_after_seconds=2, timeout_seconds=12, sanitize=False)
    _, _, calls = str(raised.value).partition("(calls of fabric) over nccl the ranks diverge at call 2:")
    assert "call 2, rank 0: fabric.all_reduce, tests/device/test_device_collectives.py" in calls
    assert "call 2, rank 1: has not made it" in calls


@pytest.mark.slow
def test_in_a_watched_step_a_metric_on_one_rank_alone_raises_where_it_meets_gradients() -> None:
    with pytest.raises(WorkerError, match="CollectiveError: The 2 ranks did not make the same call:"):
        launch(train_after_a_metric_on_rank_zero, sanitize="always")


def split_off(fabric: Fabric) -> list[int]:
    connection: Any = dist.group.WORLD._get_backend(fabric.device)  # type: ignore[union-attr]
    numbers = [connection.comm_split_count()]
    for rank in range(2):
        fabric.collective.split([rank])
    return [*numbers, connection.comm_split_count()]


@pytest.mark.slow
def test_groups_are_split_off_the_connection_that_all_ranks_have_from_the_start() -> None:
    assert launch(split_off) == [1, 3]


def make_calls_that_differ(fabric: Fabric) -> None:
    fabric.all_reduce(torch.ones(2 + fabric.global_rank, device=fabric.device), reduce_op="sum")
    fabric.barrier()


@pytest.mark.slow
def test_calls_that_differ_over_ranks_raise_in_the_next_call_with_the_lines_that_made_them() -> None:
    with pytest.raises(WorkerError, match="CollectiveError: The 2 ranks did not make the same call:") as raised:
        launch(make_calls_that_differ)
    line = make_calls_that_differ.__code__.co_firstlineno + 1
    for rank in range(2):
        made = (
            f"  rank {rank}: all_reduce with op='sum', at tests/device/test_device_collectives.py:{line} in make_calls"
        )
        _, _, call = str(raised.value).partition(made)
        assert f"data: float32 ({2 + rank},) on cuda" in call


def call_before_the_other_rank(fabric: Fabric) -> list[float]:
    store = fabric.collective.store()
    assert store is not None
    if fabric.global_rank == 1:
        store.wait(["rank 0 went on"], timedelta(seconds=20))
    with counting() as waits:
        total = fabric.all_reduce({"loss": torch.ones(2, device=fabric.device)}, reduce_op="sum")
        store.set("rank 0 went on", "")
        gathered = fabric.all_gather(torch.ones(2, device=fabric.device))
    assert waits.total == 0, waits.lines
    return [*total["loss"].tolist(), *gathered.flatten().tolist()]


@pytest.mark.slow
def test_a_host_goes_on_after_a_metric_before_another_has_come_to_it() -> None:
    assert launch(call_before_the_other_rank) == [2.0] * 2 + [1.0] * 4


def receive_in_a_thread(fabric: Fabric) -> None:
    received: list[Any] = []
    sent = {
        "small": [torch.full((3,), 7.0, device=fabric.device)] * 2,
        "large": torch.ones(2**18, device=fabric.device),
    }

    def receive() -> None:
        received.append(fabric.broadcast(sent if fabric.global_rank == 0 else None))

    thread = threading.Thread(target=receive)
    thread.start()
    thread.join()
    tensors = [*received[0]["small"], received[0]["large"]]
    assert [each.device for each in tensors] == [fabric.device] * 3
    assert tensors[0].tolist() == [7.0] * 3


@pytest.mark.slow
def test_what_a_rank_receives_in_a_thread_of_the_program_is_on_its_device() -> None:
    launch(receive_in_a_thread)


def send_rows(fabric: Fabric) -> None:
    owner = torch.tensor([1, 0, 1], device=fabric.device)
    rows = torch.arange(3.0, device=fabric.device)[:, None] + 10 * fabric.global_rank
    with counting() as waits:
        route = Route(fabric.collective, owner)
        back = route.send_back(route.send(rows) * 2)
    assert waits.total == 1, waits.lines
    assert torch.equal(back, rows * 2)


@pytest.mark.slow
def test_a_route_there_and_back_waits_once_for_the_device() -> None:
    launch(send_rows)


def clip_over_ranks(fabric: Fabric) -> None:
    weight = nn.Parameter(torch.zeros(1, device=fabric.device))
    weight.grad = torch.full_like(weight, 3.0 + fabric.global_rank)
    optimizer = SGD([weight], lr=0.1)
    with counting() as waits:
        norm = clip_norm([optimizer], 1.0, 2.0, False, None, across=fabric.collective)
    assert waits.total == 0, waits.lines
    assert norm.item() == 5
    torch.testing.assert_close(weight.grad.item(), (3 + fabric.global_rank) / 5)


@pytest.mark.slow
def test_a_norm_over_ranks_with_other_parameters_stays_on_the_device() -> None:
    launch(clip_over_ranks)


def average_with_one_gradient_missing(fabric: Fabric) -> int:
    first, second, third = (nn.Parameter(torch.zeros(2, device=fabric.device)) for _ in range(3))
    first.grad = torch.full_like(first, 1.0 + fabric.global_rank)
    second.grad = torch.ones_like(second) if fabric.global_rank == 0 else None
    with counting() as waits:
        fabric.average_gradients([first, second])
    numbers = waits.total
    fabric.average_gradients([third])
    assert third.grad is None
    assert first.grad.tolist() == [1.5, 1.5]
    assert second.grad is not None
    assert second.grad.tolist() == [0.5, 0.5]
    assert (numbers > 0) == (fabric.global_rank == 1), "the rank that has all gradients need not know of the others"
    return numbers


@pytest.mark.slow
def test_only_a_rank_that_lacks_a_gradient_waits_to_average_and_the_others_count_as_zero() -> None:
    assert launch(average_with_one_gradient_missing) == 0
