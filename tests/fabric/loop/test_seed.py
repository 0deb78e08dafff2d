from __future__ import annotations

import os
import random
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from worlds import run_world

from fabric.launchers.world import World
from fabric.loop.seed import derive_seed, seed_everything
from fabric.strategies.data.rng import preserved_rngs


def draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist(), np.random.permutation(5).tolist()


def draw_on_rank(world: World, seed: int) -> tuple[Any, Any]:
    seed_everything(seed)
    common = draw()
    seed_everything(derive_seed(seed, world.rank))
    return common, draw()


def test_the_same_seed_gives_the_same_numbers_in_python_numpy_and_torch() -> None:
    with preserved_rngs():
        assert seed_everything(7) == 7
        first = draw()
        seed_everything(7)
        assert draw() == first
        seed_everything(8)
        assert all(one != other for one, other in zip(draw()[:3], first[:3], strict=True))


def test_seeding_equals_the_seed_functions_of_the_libraries() -> None:
    with preserved_rngs():
        seed_everything(5)
        together = draw()
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        assert draw() == together


def test_seeding_writes_nothing_to_the_environment() -> None:
    before = dict(os.environ)
    with preserved_rngs():
        seed_everything(1)
    assert dict(os.environ) == before


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_both_ends_of_the_range_are_seeds(seed: int) -> None:
    with preserved_rngs():
        assert seed_everything(seed) == seed


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_an_error(seed: int) -> None:
    words = f"`seed_everything({seed})`: the seed is out of range. Write 0 to 4294967295."
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        seed_everything(seed)


@pytest.mark.parametrize(("seed", "kind"), [(None, "NoneType"), (1.0, "float"), ("1", "str"), (True, "bool")])
def test_a_seed_that_is_no_int_is_an_error(seed: Any, kind: str) -> None:
    words = (
        f"`seed_everything({seed!r})`: the seed is a `{kind}`. Write an int from 0 to 4294967295; "
        "for another one in each run, draw it yourself and log it."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
        seed_everything(seed)


def test_leaving_out_the_workers_is_an_error() -> None:
    words = (
        "`seed_everything(1, workers=False)`: a DataLoader's workers are always seeded from the generator of their "
        "rank. Leave `workers` out, and draw what must not be reproducible in a `worker_init_fn`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        seed_everything(1, workers=False)


def test_derived_seeds_are_the_same_in_every_version() -> None:
    assert derive_seed(0) == 122959875
    assert derive_seed(1, 2, 3) == 2286055514


def test_derived_seeds_of_neighbours_differ_in_about_half_of_their_bits() -> None:
    seeds = [derive_seed(0, rank) for rank in range(256)]
    assert len(set(seeds)) == 256
    flipped = [(one ^ other).bit_count() for one, other in pairwise(seeds)]
    assert 15 < sum(flipped) / len(flipped) < 17


def test_a_derived_seed_depends_on_the_order_of_its_path() -> None:
    assert len({derive_seed(0, 1, 2), derive_seed(0, 2, 1), derive_seed(0, 12), derive_seed(1, 0, 2)}) == 4


@pytest.mark.slow
def test_ranks_draw_equal_numbers_from_one_seed_and_different_ones_from_derived_seeds() -> None:
    (common_0, own_0), (common_1, own_1) = run_world(2, draw_on_rank, 4)
    assert common_0 == common_1
    assert own_0[0] != own_1[0]
    assert own_0[2] != own_1[2]
