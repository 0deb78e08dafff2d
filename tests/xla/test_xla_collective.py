"""The collective over XLA keeps the contract of all collectives, for tensors on the CPU and on the device."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cpu_replicas import run_replicas

from fabric.launchers.world import World
from fabric.strategies.collectives import nested
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.xla.collective import OF_ALL_REPLICAS, XLACollective

SIZE = int(os.environ["CPU_NUM_DEVICES"])


def load_contract() -> ModuleType:
    """`tests/contracts/test_collective.py`, whose bodies every collective passes."""
    path = Path(__file__).parents[1] / "contracts" / "test_collective.py"
    spec = importlib.util.spec_from_file_location("collective_contract", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONTRACT = load_contract()


def keep_contract(world: World, seed: int) -> dict[str, str]:
    collective = XLACollective(world, timeout_seconds=20)
    collective.setup()
    failures: dict[str, str] = load_contract().run_bodies(collective, seed)
    collective.teardown()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_replicas(keep_contract, random.randrange(2**32))


@pytest.mark.slow
@pytest.mark.parametrize("body", CONTRACT.BODIES, ids=lambda body: body.__name__)
def test_the_collective_over_xla_keeps_the_contract(failures: list[dict[str, str]], body: Any) -> None:
    of_body = [of_rank[body.__name__] for of_rank in failures if body.__name__ in of_rank]
    assert not of_body, "\n".join(of_body)


@pytest.mark.slow
@pytest.mark.parametrize("body", [*CONTRACT.POINT_TO_POINT, *CONTRACT.SUBGROUPS], ids=lambda body: body.__name__)
def test_what_xla_does_not_have_is_refused_on_every_rank(failures: list[dict[str, str]], body: Any) -> None:
    for of_rank in failures:
        assert OF_ALL_REPLICAS in of_rank[body.__name__]


MOVED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int16, torch.int64, torch.bool)
REDUCED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)


def talk_on_the_device(world: World) -> dict[str, Any]:
    """Every operation on tensors of the device; the results, on the CPU, and where they were."""
    import torch_xla

    device = torch_xla.device()
    collective = XLACollective(world, timeout_seconds=20)
    collective.setup()

    def mine(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, 1 + world.rank).to(dtype).to(device)

    results: dict[str, torch.Tensor] = {}
    for dtype in MOVED:
        results[f"gather {dtype}"] = collective.all_gather(mine(dtype, 2, 3))
        results[f"broadcast {dtype}"] = collective.broadcast(mine(dtype, 3), SIZE - 1)
    for dtype in REDUCED:
        results[f"sum {dtype}"] = collective.all_reduce(mine(dtype, 3))
    results["empty"] = collective.all_gather(mine(torch.float32, 0, 2))
    results["number"] = collective.all_gather(mine(torch.float32))
    results["mean of integers"] = collective.all_reduce(mine(torch.int64, 2), "mean")
    results["scatter"] = collective.reduce_scatter(mine(torch.float32, SIZE, 2), "max")
    results["exchange"] = collective.all_to_all(mine(torch.int64, SIZE, 2))
    nest = {"a": mine(torch.float32, 2), "b": [mine(torch.int64), mine(torch.float32, 200_000)], "c": 1.5}
    gathered = nested.all_gather(collective, nest)
    results["nest a"], results["nest b"], results["nest large"] = (
        gathered["a"],
        gathered["b"][0],
        gathered["b"][1][:, 0],
    )
    results["nest mean"] = nested.all_reduce(collective, {"a": mine(torch.float32, 2)})["a"]
    results["object"] = collective.broadcast_object([mine(torch.float32, 2), "word"], SIZE - 1)[0]
    if world.rank == 0:  # what one rank alone goes on to compute, or does not read, is no matter of the others
        results["alone"] = collective.all_reduce(mine(torch.float32, 1)) * 3
    else:
        collective.all_reduce(mine(torch.float32, 1))
    with pytest.raises(CollectiveError, match=rf"`all_gather` on rank {world.rank} of {SIZE}, which has not met"):
        XLACollective(world).all_gather(mine(torch.float32, 1))
    assert {tensor.device for tensor in results.values()} == {device}
    collective.teardown()
    return {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in results.items()}


@pytest.mark.slow
def test_tensors_on_the_device_stay_there_and_keep_their_dtypes() -> None:
    for rank, got in enumerate(run_replicas(talk_on_the_device)):
        ranks = [float(1 + other) for other in range(SIZE)]
        for dtype in MOVED:
            of_rank = [True] * SIZE if dtype is torch.bool else ranks
            assert got[f"gather {dtype}"] == (str(dtype), [[[one] * 3] * 2 for one in of_rank])
            assert got[f"broadcast {dtype}"] == (str(dtype), [of_rank[-1]] * 3)
        for dtype in REDUCED:
            assert got[f"sum {dtype}"] == (str(dtype), [sum(ranks)] * 3)
        assert got["empty"][1] == [[]] * SIZE
        assert got["number"][1] == ranks
        assert got["mean of integers"] == ("torch.float32", [sum(ranks) / SIZE] * 2)
        assert got["scatter"][1] == [ranks[-1]] * 2
        assert got["exchange"][1] == [[one] * 2 for one in ranks]
        assert got["nest a"][1] == [[one] * 2 for one in ranks]
        assert got["nest b"] == ("torch.int64", ranks)
        assert got["nest large"][1] == ranks
        assert got["nest mean"][1] == [sum(ranks) / SIZE] * 2
        assert got["object"][1] == [ranks[-1]] * 2
        if rank == 0:
            assert got["alone"][1] == [3 * sum(ranks)]
