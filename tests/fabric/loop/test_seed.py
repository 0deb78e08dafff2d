from __future__ import annotations

import os
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from fabric.loop.seed import seed_everything
from fabric.strategies.data.rng import preserved_rngs


def draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist(), np.random.permutation(5).tolist()


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


@pytest.mark.parametrize(("seed", "kind"), [(-1, ValueError), (2**32, ValueError), (None, TypeError)])
def test_what_is_no_seed_is_an_error(seed: Any, kind: type[Exception]) -> None:
    with preserved_rngs(), pytest.raises(kind):
        seed_everything(seed)


def test_leaving_out_the_workers_is_an_error() -> None:
    words = (
        "`seed_everything(1, workers=False)`: a DataLoader's workers are always seeded from the generator of their "
        "rank. Leave `workers` out, and draw what must not be reproducible in a `worker_init_fn`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        seed_everything(1, workers=False)
