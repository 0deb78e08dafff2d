"""Nests of tensors over ranks: the containers, the messages they cost, and ranks that differ."""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fakes import ThreadCollective, run_threads
from torch import Tensor
from worlds import run_world

from fabric.launchers.world import World
from fabric.strategies.collectives import nested
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.tensors.packing import LARGE_BYTES, Packing, Spec

Body = Callable[[Collective], Any]


def on_torch(world: World, body: Body) -> Any:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"), timeout_seconds=20)
    collective.setup()
    result = body(collective)
    collective.teardown()
    return result


def run_both(size: int, body: Body) -> list[list[Any]]:
    """What each rank returned: over threads, and over processes."""
    return [run_threads(size, body), run_world(size, on_torch, body)]


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Tensor
    loss: Tensor | None = None
    cached: list[Tensor] = dataclasses.field(default_factory=list)


class Encoding(collections.UserDict[str, Any]):
    """A mapping as tokenizers return it: no dict, and with an attribute."""

    name = "none"


def gather_every_container(collective: Collective) -> Any:
    rank = collective.rank
    encoding = Encoding(ids=torch.full((2,), rank))
    encoding.name = "mine"
    counts = collections.defaultdict(list, {"n": [rank, float(rank), rank == 0, complex(rank)]})
    nest = {
        "tuple": (torch.tensor(rank), None),
        "pair": Pair(torch.tensor([rank]), {"x": torch.tensor([[rank]])}),
        "output": Output(logits=torch.full((1, 2), float(rank)), cached=[torch.tensor(rank)]),
        "encoding": encoding,
        "counts": counts,
        "empty": ([], {}, torch.zeros(0)),
    }
    return nested.all_gather(collective, nest)


def test_all_gather_keeps_every_container_and_adds_the_world_dimension() -> None:
    for results in run_both(2, gather_every_container):
        for got in results:
            assert list(got) == ["tuple", "pair", "output", "encoding", "counts", "empty"]
            assert got["tuple"][0].tolist() == [0, 1]
            assert got["tuple"][1] is None
            assert type(got["pair"]) is Pair
            assert got["pair"].left.tolist() == [[0], [1]]
            assert got["pair"].right["x"].tolist() == [[[0]], [[1]]]
            assert type(got["output"]) is Output
            assert got["output"].logits.tolist() == [[[0, 0]], [[1, 1]]]
            assert got["output"].loss is None
            assert got["output"].cached[0].tolist() == [0, 1]
            assert type(got["encoding"]) is Encoding
            assert got["encoding"].name == "mine"
            assert got["encoding"]["ids"].tolist() == [[0, 0], [1, 1]]
            assert type(got["counts"]) is collections.defaultdict
            numbers = got["counts"]["n"]
            assert [number.tolist() for number in numbers] == [[0, 1], [0, 1], [True, False], [0, 1]]
            assert [number.dtype for number in numbers] == [torch.int64, torch.float64, torch.bool, torch.complex128]
            assert got["empty"][:2] == ([], {})
            assert got["empty"][2].shape == (2, 0)


def gather_and_reduce_in_another_order(collective: Collective) -> tuple[Any, Any]:
    pairs = [("a", torch.tensor(1.0)), ("b", torch.tensor(2.0)), ("c", torch.tensor(3.0))]
    nest = dict(pairs if collective.rank == 0 else reversed(pairs))
    return nested.all_gather(collective, nest), nested.all_reduce(collective, nest)


def test_ranks_may_fill_their_dicts_in_different_orders() -> None:
    for results in run_both(2, gather_and_reduce_in_another_order):
        for rank, (gathered, means) in enumerate(results):
            assert {key: value.tolist() for key, value in gathered.items()} == {"a": [1, 1], "b": [2, 2], "c": [3, 3]}
            assert {key: value.item() for key, value in means.items()} == {"a": 1, "b": 2, "c": 3}
            assert list(means) == (["a", "b", "c"] if rank == 0 else ["c", "b", "a"])


def reduce_many_dtypes(collective: Collective) -> Any:
    rank = collective.rank
    nest = [torch.tensor([rank, 1]), torch.tensor(rank == 0), torch.tensor(float(rank)).bfloat16(), rank, rank + 0.5]
    large = torch.full((LARGE_BYTES // 4,), float(rank))
    return nested.all_reduce(collective, {"nest": nest, "large": large})


def test_all_reduce_means_by_default_whatever_the_dtype_and_size() -> None:
    for results in run_both(2, reduce_many_dtypes):
        for got in results:
            assert [value.tolist() for value in got["nest"]] == [[0.5, 1], 0.5, 0.5, 0.5, 1.0]
            expected = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float64]
            assert [value.dtype for value in got["nest"]] == expected
            assert got["large"].unique().tolist() == [0.5]


def gather_backward(collective: Collective) -> tuple[Any, ...]:
    rank = collective.rank
    weights = {"w": torch.full((2, 2), rank + 1.0, requires_grad=True), "b": torch.ones(3, dtype=torch.float64)}
    weights["b"].requires_grad_()
    got = nested.all_gather(collective, {**weights, "count": torch.tensor(rank)}, sync_grads=True)
    ((rank + 1) * (got["w"] ** 2).sum() + got["b"].sum()).backward()
    bare = torch.ones(2, requires_grad=True)
    nested.all_gather(collective, bare, sync_grads=True)[0].sum().backward()
    return got["w"].tolist(), got["count"].requires_grad, weights["w"].grad, weights["b"].grad, bare.grad


def test_sync_grads_gives_each_rank_the_sum_of_all_ranks_gradients() -> None:
    for results in run_both(2, gather_backward):
        for rank, (gathered, traced, of_w, of_b, of_bare) in enumerate(results):
            assert gathered == [[[1, 1], [1, 1]], [[2, 2], [2, 2]]]
            assert not traced
            # d/dw of (1 + 2) * w**2, from both ranks' losses
            torch.testing.assert_close(of_w, torch.full((2, 2), 3 * 2 * (rank + 1.0)))
            torch.testing.assert_close(of_b, torch.full((3,), 2.0, dtype=torch.float64))
            assert of_bare.tolist() == ([2, 2] if rank == 0 else [0, 0])


def test_without_sync_grads_nothing_is_traced() -> None:
    def body(collective: Collective) -> list[bool]:
        mine = {"w": torch.ones(2, requires_grad=True)}
        results = nested.all_gather(collective, mine), nested.all_reduce(collective, mine)
        return [result["w"].requires_grad for result in results]

    assert run_threads(2, body) == [[False, False]] * 2


def test_a_hundred_small_tensors_are_a_comparison_and_one_message() -> None:
    def body(collective: ThreadCollective) -> list[list[str]]:
        small = {f"m{index}": torch.ones(256) for index in range(100)}
        calls = []
        for operation in (
            lambda: nested.all_reduce(collective, torch.ones(())),
            lambda: nested.all_reduce(collective, {"loss": 1.0}, "sum"),
            lambda: nested.all_reduce(collective, torch.ones((), dtype=torch.int64), "max"),
            lambda: nested.all_gather(collective, torch.ones(())),
            lambda: collective.broadcast_object(torch.ones(())),
            lambda: nested.all_reduce(collective, small),
            lambda: nested.all_gather(collective, small),
            lambda: nested.all_gather(collective, [small, torch.ones(LARGE_BYTES // 4)]),
        ):
            collective.calls.clear()
            operation()
            calls.append(list(collective.calls))
        return calls

    for calls in run_threads(2, body):
        assert calls == [
            ["all_reduce", "all_reduce"],
            ["all_reduce", "all_reduce"],
            ["all_reduce", "all_reduce"],
            ["all_reduce", "all_gather"],
            ["all_reduce", "broadcast", "broadcast"],
            ["all_reduce", "all_reduce"],
            ["all_reduce", "all_gather"],
            ["all_reduce", "all_gather", "all_gather"],
        ]


def call_rank_0_alone(collective: Collective) -> Tensor:
    return nested.all_reduce(collective, torch.ones(1))


def call_all_ranks(collective: Collective) -> Tensor:
    return nested.all_gather(collective, torch.ones(1))


def _line_of(function: Callable[..., Any]) -> str:
    return f"test_nested.py:{function.__code__.co_firstlineno + 1} in {function.__name__}"


def gather_what_differs(collective: Collective) -> list[str]:
    rank = collective.rank
    one = torch.ones(1)
    calls: list[Callable[[], Any]] = [
        lambda: nested.all_gather(collective, {"x": torch.ones(4 - rank, 10), "y": one}),
        lambda: nested.all_gather(collective, {"x": one.double() if rank else one}),
        lambda: nested.all_gather(collective, {"x": one, "z" if rank else "y": one}),
        lambda: nested.all_reduce(collective, [one], "sum") if rank else nested.all_gather(collective, [one]),
        lambda: nested.all_reduce(collective, [one], "sum" if rank else "mean"),
        lambda: collective.broadcast_object({"x": 1}, src=rank),
        lambda: collective.broadcast_object(one) if rank else collective.all_gather_object(one),
        lambda: nested.all_gather(collective, [one, one.clone().requires_grad_(rank == 0)], sync_grads=True),
        lambda: collective.split([0, 1] if rank else [0]),
        lambda: nested.all_gather(collective, ["word" if rank else one]),
        lambda: call_all_ranks(collective) if rank else call_rank_0_alone(collective),
    ]
    messages = []
    for call in calls:
        with pytest.raises(CollectiveError) as info:
            call()
        assert info.value.rank == rank
        messages.append(str(info.value))
        assert nested.all_gather(collective, [rank])[0].tolist() == list(range(collective.size))  # it still works
    return messages


def test_ranks_that_differ_each_get_all_calls_side_by_side() -> None:
    for results in run_both(2, gather_what_differs):
        assert results[0] == results[1]
        first = re.sub(r", at \S*test_nested\.py:\d+ in <lambda>$", ", at HERE", results[0][0], flags=re.MULTILINE)
        assert first == (
            "The 2 ranks did not make the same call:\n"
            "  rank 0: all_gather, at HERE\n"
            "      data['x']: float32 (4, 10) on cpu\n"
            "      and 1 as on all ranks\n"
            "  rank 1: all_gather, at HERE\n"
            "      data['x']: float32 (3, 10) on cpu\n"
            "      and 1 as on all ranks\n"
            "No rank has a result. Make all ranks call the same operation, in the same order, on equal shapes and "
            "dtypes.\n"
            "If lengths differ on purpose, pad each tensor to the length of the longest, "
            "`fabric.all_reduce(torch.tensor(len(tensor)), reduce_op='max')`; for the values of an evaluation's "
            "batches use `fabric.gather_for_metrics(values, loader)`."
        )
        words = [
            ("data['x']: float32 (1,)", "data['x']: float64 (1,)"),
            ("data['y']", "data['z']"),
            ("rank 0: all_gather", "rank 1: all_reduce with op='sum'"),
            ("rank 0: all_reduce with op='mean'", "rank 1: all_reduce with op='sum'"),
            ("rank 0: broadcast from rank 0", "rank 1: broadcast from rank 1"),
            ("rank 0: all_gather of objects", "rank 1: broadcast from rank 0"),
            ("rank 0: all_gather with sync_grads", "data[1]: float32 (1,) on cpu, requires grad"),
            ("rank 0: split([0])", "rank 1: split([0, 1])"),
            ("rank 0: all_gather, at ", "rank 1: all_gather, refused: `data[0]` is a `str`"),
            (_line_of(call_rank_0_alone), _line_of(call_all_ranks)),
        ]
        for message, (of_first, of_second) in zip(results[0][1:], words, strict=True):
            assert of_first in message
            assert of_second in message


def test_ranks_with_the_same_call_share_a_line_and_long_calls_are_cut() -> None:
    def body(collective: Collective) -> str:
        width = 2 if collective.rank == 1 else 1
        with pytest.raises(CollectiveError) as info:
            nested.all_gather(collective, [torch.ones(width)] * 30)
        return str(info.value)

    message = run_threads(4, body)[0]
    assert "ranks 0, 2, 3: all_gather" in message
    assert "rank 1: all_gather" in message
    assert "and 20 more that not all ranks have" in message


def test_the_comparison_of_calls_ignores_the_default_device() -> None:
    def body(collective: Collective) -> Any:
        ones = torch.ones(2)
        with torch.device("meta"):
            gathered = nested.all_gather(collective, {"x": ones, "n": collective.rank})
            word = collective.broadcast_object("w" * 1000)
            return gathered["x"].tolist(), gathered["n"].tolist(), len(word), collective.reduce_boolean_decision(True)

    assert run_threads(2, body) == [([[1, 1], [1, 1]], [0, 1], 1000, True)] * 2


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"name": "x"}, TypeError, r"`data\['name'\]` is a `str`, which is neither a tensor, a number, None"),
        ([(torch.Size([1]),)], TypeError, r"`data\[0\]\[0\]` is a `Size`, which cannot be rebuilt with other members"),
        ([2**63], ValueError, r"`data\[0\]` is 9223372036854775808, which does not fit into 64 bits"),
        (Output(torch.ones(1), cached=[object()]), TypeError, r"`data\.cached\[0\]` is a `object`"),
    ],
)
def test_a_value_that_is_not_a_tensor_raises_with_its_path(data: Any, error: type[Exception], words: str) -> None:
    def body(collective: Collective) -> None:
        with pytest.raises(error, match=words):
            nested.all_gather(collective, data)
        with pytest.raises(error, match=words):
            nested.all_reduce(collective, data)
        assert collective.broadcast_object(collective.rank) == 0

    run_threads(2, body)


def test_packed_tensors_are_unpacked_unchanged() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    dtypes = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
    dtypes += [torch.float8_e4m3fn, torch.uint16, torch.complex64]
    for _ in range(50):
        shapes = [tuple(rng.choice((0, 1, 3)) for _ in range(rng.randrange(3))) for _ in range(rng.randrange(1, 9))]
        tensors = [torch.randint(0, 2, shape).to(rng.choice(dtypes)) for shape in shapes]
        packing = Packing([Spec.of(tensor) for tensor in tensors])
        row = packing.pack(tensors)
        assert row.shape == (packing.num_bytes,)
        for tensor, unpacked in zip(tensors, packing.unpack(torch.stack([row, row, row])), strict=True):
            assert unpacked.dtype is tensor.dtype
            assert unpacked.tolist() == [tensor.tolist()] * 3
