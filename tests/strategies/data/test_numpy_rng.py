"""The fast exchange of numpy's global state gives the numbers that `get_state` and `set_state` give."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fabric.strategies.data.numpy_rng import NumpyState
from fabric.strategies.data.rng import Streams

DRAWS: list[Callable[[], Any]] = [
    np.random.randn,  # leaves the second number of a pair in the generator
    lambda: np.random.randn(3).tolist(),
    lambda: np.random.rand(500).tolist(),
    lambda: np.random.randint(10),
    lambda: np.random.permutation(700).tolist(),
    lambda: np.random.seed(5),
    lambda: np.random.get_state()[2:],
]


class Slow:
    """The state by numpy's own functions."""

    def take(self) -> Any:
        return np.random.get_state()

    def put(self, state: Any) -> None:
        np.random.set_state(state)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    bits, state = np.random.get_bit_generator(), np.random.get_state(legacy=False)
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(state)


def draw_from_two_streams(numpys: Any, seed: int) -> list[Any]:
    """Draws that alternate at random between two states."""
    choice, drawn = random.Random(seed), []
    np.random.seed(seed)
    other = numpys.take()
    numpys.put(other)
    np.random.seed(seed + 1)
    for _ in range(60):
        drawn += [choice.choice(DRAWS)() for _ in range(choice.randrange(4))]
        mine = numpys.take()
        numpys.put(other)
        other = mine
    return drawn


@pytest.mark.parametrize("seed", range(5))
def test_numbers_are_those_of_get_state_and_set_state(seed: int) -> None:
    assert draw_from_two_streams(NumpyState(), seed) == draw_from_two_streams(Slow(), seed)


@pytest.mark.parametrize("num_normals", [2, 3])  # after an odd number the generator holds another one
def test_the_state_of_a_mersenne_twister_is_a_copy_of_its_memory(num_normals: int) -> None:
    np.random.seed(4)
    np.random.randn(num_normals)
    _, numbers, position, holds_a_normal, normal = np.random.get_state()
    numpys = NumpyState()
    state = numpys.take()
    numpys.put(state)
    assert state == (numbers.tobytes() + position.to_bytes(4, sys.byteorder), normal if holds_a_normal else None)
    assert np.random.get_state()[2:] == (position, holds_a_normal, normal)


def test_another_bit_generator_is_kept_apart() -> None:
    np.random.set_bit_generator(np.random.PCG64(3))
    np.random.randn()
    kept = np.random.get_state(legacy=False)
    with Streams(7, []).drawing():
        np.random.randn(4)
    assert np.random.get_state(legacy=False) == kept


def test_bit_generator_replaced_while_a_loader_is_read_raises() -> None:
    streams = Streams(7, [])
    np.random.set_bit_generator(np.random.MT19937(3))
    with pytest.raises(RuntimeError, match=r"`numpy\.random\.set_bit_generator` was called"), streams.drawing():
        pass


def test_an_exception_within_the_stream_restores_the_state() -> None:
    np.random.seed(3)
    first = np.random.randn(3).tolist(), np.random.randn(3).tolist()
    np.random.seed(3)
    before = np.random.randn(3).tolist()
    with contextlib.suppress(ZeroDivisionError), Streams(7, []).drawing():
        np.random.randn(3)
        raise ZeroDivisionError
    assert (before, np.random.randn(3).tolist()) == first
