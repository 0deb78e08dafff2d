"""In watched steps, every collective of torch.distributed is compared over the ranks before it runs."""

from __future__ import annotations

import gc
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR
from torch import nn

from fabric import Fabric
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.collectives.torch_calls_check import NOT_COMPARED, OPERATORS, compare_collectives


def test_every_operator_of_torch_s_process_groups_is_known() -> None:
    schemas = {schema.name: schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
    known = {f"c10d::{name}" for name in (*OPERATORS, *NOT_COMPARED)}
    assert known - set(schemas) <= {"c10d::gather_into_tensor_", "c10d::check_for_nan"}, "which torch 2.9 does not have"
    assert set(schemas) <= known
    for name, shown in OPERATORS.items():
        if schema := schemas.get(f"c10d::{name}"):
            assert {"process_group", *shown[1:]} <= {each.name for each in schema.arguments}, name


def call_an_operator_of_a_later_torch(fabric: Fabric) -> list[str]:
    """What is warned of, where both ranks call it twice, and another collective after it."""
    later = torch.library.Library("c10d", "FRAGMENT")
    later.define("in_a_later_torch_(Tensor tensor, int rank) -> Tensor")
    later.impl("in_a_later_torch_", lambda tensor, rank: tensor + rank, "CPU")
    with warnings.catch_warnings(record=True) as caught, compare_collectives():
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.ops.c10d.in_a_later_torch_(torch.zeros(1), fabric.global_rank).item() == fabric.global_rank
        with pytest.raises(CollectiveError, match="did not make the same call"):
            dist.all_reduce(torch.ones(2 + fabric.global_rank))
    return [str(each.message) for each in caught]


def test_an_operator_that_is_not_known_is_said_once_and_compares_nothing() -> None:
    [warning] = Fabric(accelerator="cpu", devices=2, sanitize=False).launch(call_an_operator_of_a_later_torch)
    assert re.match(r"`c10d::in_a_later_torch_` is not compared over the ranks: .* operator of torch 2\.", warning)


def calls_that_differ(fabric: Fabric) -> list[str]:
    """The messages of collectives in which the ranks differ, on all ranks alike."""
    first = fabric.global_rank == 0
    pair = dist.new_group([0, 1])
    one, two = torch.ones(2, 3), torch.ones(3, 2)

    def from_two_lines() -> None:
        if first:
            dist.broadcast(one, src=0)  # the first line
        else:
            dist.broadcast(one, src=0)

    def gathered(tensor: torch.Tensor) -> None:
        dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor)

    calls: dict[str, Callable[[], Any]] = {
        "operation": lambda: dist.all_reduce(one) if first else dist.barrier(),
        "shape": lambda: dist.all_reduce(one if first else two, group=pair),
        "dtype": lambda: dist.all_reduce(one if first else one.int(), async_op=True),
        "source": lambda: dist.broadcast(one, src=0 if first else 1),
        "gathered": lambda: gathered(one if first else two),
        "of fabric": lambda: fabric.all_reduce(one) if first else fabric.barrier(),
        "of fabric and of torch": lambda: fabric.all_reduce(one) if first else dist.all_reduce(one),
        "objects": lambda: dist.all_gather_object([None, None], 1) if first else dist.all_reduce(one),
        "without autograd": torch.inference_mode()(lambda: dist.all_reduce(torch.ones(3 if first else 4))),
    }
    from_two_lines()  # right
    messages = []
    for name, call in calls.items():
        with pytest.raises(CollectiveError, match="The 2 ranks did not make the same call") as caught:
            call()
        messages.append(f"{name}: {caught.value}")
        dist.all_reduce(torch.ones(3))  # a later call works
    return messages


def calls_of_the_backends_that_differ(fabric: Fabric) -> list[str]:
    """The messages of a model's own collectives, where one rank makes another call first."""
    messages = []
    for _ in range(2):
        model = nn.Linear(4, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()

        def differ(model: nn.Module = model) -> None:
            if fabric.global_rank == 1:
                dist.all_reduce(torch.ones(5))
            fabric.backward(model(torch.ones(2, 4)).sum())

        with pytest.raises(CollectiveError) as caught:
            differ()
        messages.append(str(caught.value))
        model.zero_grad()  # what a backward has left that was not finished
    return messages


def test_calls_that_differ_in_anything_raise_on_all_ranks_before_they_run() -> None:
    messages = Fabric(accelerator=ACCELERATOR, devices=2, sanitize="always").launch(calls_that_differ)
    found = dict(message.split(": ", 1) for message in messages)
    assert "rank 0: all_reduce, at " in found["operation"]
    assert "rank 1: barrier, at " in found["operation"]
    assert "      tensors: float32 (3, 2)" in found["shape"]
    assert "      tensors: int32 (2, 3)" in found["dtype"]
    assert "      root_rank: 1" in found["source"]
    assert "rank 0: all_reduce with op='mean', at " in found["of fabric"]
    assert "rank 1: all_reduce, at " in found["of fabric and of torch"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "call"),
    [("ddp", "broadcast"), ("fsdp", "all_gather_into_tensor"), ("ddp_sharded", "reduce"), ("deepspeed_stage_2", "all")],
)
def test_the_collectives_of_backends_are_compared(strategy: str, call: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, sanitize="always")
    for message in fabric.launch(calls_of_the_backends_that_differ):
        assert "test_torch_calls_check.py" in message
        outer = rf"forward of a module, .* \({call}|fabric\.backward, .* in differ, after \d step.? \({call}"
        assert re.search(rf"rank 0: ({call}|{outer})", message)
        assert "rank 1: all_reduce" in message


def calls_of_a_thread(fabric: Fabric) -> list[float]:
    """A sum by a thread that the program starts, while this rank compares its own calls, or not yet."""
    group, found = dist.new_group([0, 1]), torch.ones(5)
    with compare_collectives() if fabric.global_rank else nullcontext():
        thread = threading.Thread(target=dist.all_reduce, args=(found,), kwargs={"group": group})
        thread.start()
        thread.join()
    return found.tolist()


def test_the_calls_of_another_thread_are_left_alone_whenever_a_rank_begins_to_compare() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, sanitize=False, launcher="forkserver")
    assert fabric.launch(calls_of_a_thread) == [2] * 5


def is_compared() -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect"))


def compare_twice(fabric: Fabric) -> list[bool]:
    seen = [is_compared()]
    with Fabric(accelerator=ACCELERATOR, devices=2, sanitize="always") as second:
        second.launch()
        with Fabric(accelerator=ACCELERATOR, devices=2, sanitize="always") as third, warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where a kernel is registered twice
            third.launch()
            third.barrier()
        seen.append(is_compared())
    return [*seen, is_compared()]


def test_without_the_sanitizer_and_after_close_nothing_is_compared() -> None:
    assert Fabric(accelerator=ACCELERATOR, devices=2, sanitize=False).launch(compare_twice) == [False, True, False]


def frames_in_cycles(fabric: Fabric) -> int:
    """How many frames only Python's collector would free after collectives that were compared, with their tensors."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for is_async in (False, True):
            work = dist.all_reduce(torch.ones(8), async_op=is_async)
        work.wait()
        gc.collect()
        return sum(isinstance(each, FrameType) for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_comparison_keeps_no_tensor_in_a_cycle() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, sanitize="always", launcher="forkserver")
    assert fabric.launch(frames_in_cycles) == 0
