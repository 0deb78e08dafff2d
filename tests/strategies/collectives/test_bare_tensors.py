"""A lone tensor, or number, over ranks: what differs raises on all of them, and what is equal has the right numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import run_threads
from torch import Tensor
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies.collectives import nested
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.collectives.process_group import TorchCollective

NUMBERS: tuple[Tensor, ...] = (
    torch.tensor(0.1),
    torch.tensor([[2.5]]),
    torch.tensor(1e-40, dtype=torch.float64),
    torch.tensor(60000.0).half(),
    torch.tensor([3.0]).bfloat16(),
    torch.tensor(200, dtype=torch.uint8),
    torch.tensor([-100], dtype=torch.int8),
    torch.tensor(2**31 - 1, dtype=torch.int32),
    torch.tensor(3_000_000_000, dtype=torch.uint32),
    torch.tensor(2**52 + 1),
    torch.tensor(2**62 - 1),
    torch.tensor(-(2**53) - 1),
    torch.tensor(math.inf),
    torch.tensor(math.nan),
    torch.tensor(1 + 2j),
)


def call_with_what_differs(fabric: Fabric) -> list[str]:
    rank, part = fabric.global_rank, fabric.collective.split([0, 1])
    wide, tall = torch.ones(3, 4), torch.ones(4, 3)
    first_of = lambda one, other: one if rank == 0 else other  # noqa: E731
    calls: dict[str, Callable[[], Any]] = {
        "gathered shapes": lambda: fabric.all_gather(first_of(wide, tall)),
        "gathered sizes": lambda: fabric.all_gather(torch.ones(4 - rank, 10)),
        "gathered dtypes": lambda: fabric.all_gather(first_of(wide, wide.int())),
        "gathered widths": lambda: fabric.all_gather(first_of(wide, wide.double())),
        "reduced shapes": lambda: fabric.all_reduce(first_of(wide, tall)),
        "reduced dtypes": lambda: fabric.all_reduce(first_of(wide, wide.int()), reduce_op="sum"),
        "one number and more": lambda: fabric.all_reduce(first_of(torch.tensor(1.0), wide)),
        "a number and a tensor": lambda: fabric.all_reduce(first_of(1.0, torch.tensor(1.0))),
        "an int and a float": lambda: fabric.all_gather(first_of(1, 1.0)),
        "one element": lambda: fabric.all_reduce(first_of(torch.tensor(1.0), torch.tensor([1.0]))),
        "nothing": lambda: fabric.all_gather(first_of(None, wide)),
        "a tensor and a list": lambda: fabric.all_gather(first_of(wide, [wide])),
        "large": lambda: fabric.all_gather(torch.ones(2**18 + rank)),
        "operations": lambda: first_of(fabric.all_gather, fabric.all_reduce)(torch.tensor(1.0)),
        "reductions": lambda: fabric.all_reduce(torch.tensor(1.0), reduce_op=first_of("sum", "max")),
        "group": lambda: fabric.all_reduce(first_of(wide, tall), group=part),
        "sync_grads": lambda: fabric.all_gather(first_of(wide, tall).requires_grad_(), sync_grads=True),
        "sync_grads on one": lambda: fabric.all_gather(wide, sync_grads=rank == 0),
        "sparse on one": lambda: fabric.all_reduce(first_of(wide, wide.to_sparse())),
        "broadcast": lambda: first_of(fabric.broadcast, fabric.all_gather)(wide),
        "barrier": lambda: fabric.barrier() if rank == 0 else fabric.all_gather(wide),
    }
    messages = []
    for name, call in calls.items():
        try:
            call()
        except (CollectiveError, TypeError) as error:
            messages.append(f"{name}: {type(error).__name__}: {error}")
        else:
            raise AssertionError(f"{name} raises nothing")
        assert fabric.all_gather(torch.tensor(rank)).tolist() == [0, 1]  # a later call works
    return messages


def test_a_tensor_that_differs_over_ranks_raises_on_every_rank_and_shows_both() -> None:
    results = run_world(2, on_fabric, call_with_what_differs)
    assert results[0] == results[1]
    message = dict(entry.split(": ", 1) for entry in results[0])
    line = r", at \S*test_bare_tensors\.py:\d+ in <lambda>$"
    shown = re.sub(line, ", at HERE", message["gathered shapes"], flags=re.MULTILINE)
    assert shown == (
        "CollectiveError: The 2 ranks did not make the same call:\n"
        "  rank 0: all_gather, at HERE\n"
        "      data: float32 (3, 4) on cpu\n"
        "  rank 1: all_gather, at HERE\n"
        "      data: float32 (4, 3) on cpu\n"
        "No rank has a result. Make all ranks call the same operation, in the same order, on equal shapes and dtypes.\n"
        "If lengths differ on purpose, pad each tensor to the length of the longest, "
        "`fabric.all_reduce(torch.tensor(len(tensor)), reduce_op='max')`; for the values of an evaluation's batches "
        "use `fabric.gather_for_metrics(values, loader)`."
    )
    for name, of_first, of_second in (
        ("gathered dtypes", "data: float32 (3, 4)", "data: int32 (3, 4)"),
        ("gathered widths", "data: float32 (3, 4)", "data: float64 (3, 4)"),
        ("reduced shapes", "data: float32 (3, 4)", "data: float32 (4, 3)"),
        ("one number and more", "data: float32 () on cpu", "data: float32 (3, 4)"),
        ("a number and a tensor", "data: float64 () on cpu", "data: float32 () on cpu"),
        ("nothing", "data: None", "data: float32 (3, 4)"),
        ("a tensor and a list", "data: float32", "data[0]: float32"),
        ("operations", "rank 0: all_gather", "rank 1: all_reduce with op='mean'"),
        ("reductions", "rank 0: all_reduce with op='sum'", "rank 1: all_reduce with op='max'"),
        ("sync_grads on one", "rank 0: all_gather with sync_grads", "rank 1: all_gather, at "),
        ("sparse on one", "rank 0: all_reduce", "refused: A `Tensor` of layout torch.sparse_coo"),
    ):
        assert of_first in message[name]
        assert of_second in message[name]


def on_fabric(world: World, body: Callable[[Fabric], Any]) -> Any:
    with Fabric(strategy="ddp", launcher="external") as fabric:
        fabric.launch()
        return body(fabric)


def reduce_numbers(world: World) -> list[dict[str, str]]:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"), timeout_seconds=20)
    collective.setup()
    results = []
    for number in NUMBERS:
        mine = number - world.rank if number.is_floating_point() else number
        reduced = {op: nested.all_reduce(collective, mine, op) for op in ("sum", "mean")}  # type: ignore[arg-type]
        # The same numbers in a tensor of two elements are reduced by the backend.
        two = torch.stack([mine.reshape(()), mine.reshape(())])
        for op, result in reduced.items():
            expected = collective.all_reduce(two, op)[:1].reshape(number.shape)  # type: ignore[arg-type]
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        results.append({op: str(result) for op, result in reduced.items()})
    collective.teardown()
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_one_number_has_the_sum_and_mean_that_the_backend_would_give(size: int) -> None:
    results = run_world(size, reduce_numbers)
    assert results == [results[0]] * size
    assert results[0][10]["sum"] == str(torch.tensor(size * (2**62 - 1)))
    assert results[0][9]["sum"] == str(torch.tensor(size * (2**52 + 1)))


def test_a_number_is_a_tensor_of_its_dtype_and_shape_afterwards() -> None:
    def body(collective: Collective) -> list[tuple[Any, ...]]:
        data: tuple[Any, ...] = (1, 2.5, torch.ones(1, 1).half(), [torch.tensor(True)], {"loss": torch.tensor(1.0)})
        reduced = [nested.all_reduce(collective, one) for one in data]
        flat = [
            next(iter(one.values() if isinstance(one, dict) else one)) if i > 2 else one
            for i, one in enumerate(reduced)
        ]
        return [(one.dtype, tuple(one.shape), float(one)) for one in flat]

    expected = [
        (torch.float32, (), 1.0),
        (torch.float64, (), 2.5),
        (torch.float16, (1, 1), 1.0),
        (torch.float32, (), 1.0),
        (torch.float32, (), 1.0),
    ]
    assert run_threads(2, body) == [expected] * 2


def pad_to_the_longest(collective: Collective) -> Any:
    labels = torch.zeros(2 + collective.rank, dtype=torch.int64)
    longest = nested.all_reduce(collective, torch.tensor(len(labels)), "max")
    padded = torch.nn.functional.pad(labels, (0, longest - len(labels)), value=-100)
    return nested.all_gather(collective, padded).tolist()


def test_tensors_whose_lengths_differ_are_gathered_once_they_are_padded_as_the_error_says() -> None:
    assert run_threads(2, pad_to_the_longest) == [[[0, 0, -100], [0, 0, 0]]] * 2
