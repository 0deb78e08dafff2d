"""Drawing a loader's order leaves numpy's global generator as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from fabric.strategies.data.rng import EpochRngs, process_rngs, read_all


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    bits, state = np.random.get_bit_generator(), np.random.get_state(legacy=False)
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(state)


def streams() -> EpochRngs:
    rngs = process_rngs()
    return EpochRngs(rngs, [], read_all([*rngs.values()]))


def test_another_bit_generator_is_kept_apart() -> None:
    np.random.set_bit_generator(np.random.PCG64(3))
    np.random.randn()
    kept = np.random.get_state(legacy=False)
    with streams().drawing():
        np.random.randn(4)
    assert np.random.get_state(legacy=False) == kept


def test_an_exception_within_the_stream_restores_the_state() -> None:
    np.random.seed(3)
    first = np.random.randn(3).tolist(), np.random.randn(3).tolist()
    np.random.seed(3)
    before = np.random.randn(3).tolist()
    with contextlib.suppress(ZeroDivisionError), streams().drawing():
        np.random.randn(3)
        raise ZeroDivisionError
    assert (before, np.random.randn(3).tolist()) == first
