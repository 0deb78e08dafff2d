"""Random numbers that are equal on every rank, drawn without changing the random state of the process.

A sampler may draw from torch, `random`, numpy, or a generator of its own. So that all ranks draw the same order, the
states of all of them are replaced during a draw and restored afterwards. That costs about 40 us per draw, and 0.6 ms
where numpy is imported; for torch's own samplers, 8 us. So indices are drawn in chunks. Another thread that draws at
the same time sees the replaced states.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True)
class Rng:
    """A random generator: functions that read its state, write it, and seed it."""

    read: Callable[[], Any]
    """Returns the state, as types that a checkpoint holds: tensors, numbers, strings, tuples and dictionaries."""
    write: Callable[[Any], object]
    seed: Callable[[int], object]


def mix(*parts: object) -> int:
    """A seed of 63 bits, a hash of the `repr` of all parts: the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def torch_rng() -> Rng:
    """The global generator of torch for the CPU."""
    generator = torch.default_generator
    return Rng(generator.get_state, generator.set_state, generator.manual_seed)


def process_rngs(*, in_memory: bool = False) -> list[Rng]:
    """The global generators of torch (CPU), of `random`, and of numpy if it is imported.

    `in_memory`: of numpy, any bit generator is read, as types that a checkpoint does not hold.
    """
    found = [torch_rng(), Rng(random.getstate, random.setstate, random.seed)]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return found

    def seed_numpy(seed: int) -> None:
        numpy.random.seed(seed % 2**32)

    if not in_memory:
        return [*found, _numpys(numpy.random, seed_numpy)]
    return [*found, Rng(partial(numpy.random.get_state, legacy=False), numpy.random.set_state, seed_numpy)]


@contextmanager
def preserved_rngs(rngs: list[Rng] | None = None) -> Iterator[None]:
    """Restore the states of these generators (None: of the global ones) when the context ends."""
    rngs = process_rngs() if rngs is None else rngs
    states = [rng.read() for rng in rngs]
    try:
        yield
    finally:
        for rng, state in zip(rngs, states, strict=True):
            rng.write(state)


def own_rngs(loader: DataLoader[Any]) -> list[Rng]:
    """The generators of a loader's samplers, each once, in a fixed order.

    Found: attributes of its samplers, attributes of the sampler in its batch sampler, and the loader's `generator`.
    """
    values: list[object] = [loader.generator]
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        values += getattr(sampler, "__dict__", {}).values()
    found = {id(value): rng for value in values if (rng := _own_rng(value)) is not None}
    return list(found.values())


def _own_rng(value: object) -> Rng | None:
    if isinstance(value, torch.Generator):
        return Rng(value.get_state, value.set_state, value.manual_seed)
    if isinstance(value, random.Random):
        return Rng(value.getstate, value.setstate, value.seed)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return _numpys(value, lambda seed: value.seed(seed % 2**32))
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator

        def write(state: Any) -> None:
            bits.state = state

        return Rng(lambda: _listed(bits.state), write, lambda seed: write(type(bits)(seed).state))
    return None


def _numpys(owner: Any, seed: Callable[[int], object]) -> Rng:
    """A generator of numpy; `owner`: the module `numpy.random`, or a `RandomState`."""

    def read() -> tuple[Any, ...]:
        name, keys, *rest = owner.get_state()
        return name, keys.tobytes(), *rest

    def write(state: tuple[Any, ...]) -> None:
        name, keys, *rest = state
        owner.set_state((name, sys.modules["numpy"].frombuffer(keys, "uint32"), *rest))

    return Rng(read, write, seed)


def _listed(state: Any) -> Any:
    """The state of a bit generator with lists instead of arrays, which a checkpoint does not hold."""
    if isinstance(state, dict):
        return {key: _listed(entry) for key, entry in state.items()}
    return state.tolist() if type(state).__module__ == "numpy" else state


def digest(state: Any) -> bytes:
    """A hash of the state of a generator."""
    values = state.tolist() if isinstance(state, Tensor) else state  # equal tensors do not pickle to equal bytes
    return hashlib.blake2b(pickle.dumps(values), digest_size=16).digest()


@final
class Streams:
    """The random states of one epoch: the global generators seeded anew, and those of the user's sampler (`own`).

    Between draws `own` generators have the state in which the epoch began, so an epoch that is not counted changes
    nothing; `settle` advances them.
    """

    def __init__(self, seed: int, own: list[Rng], *, from_torch: bool = False) -> None:
        """`from_torch`: of the global generators, torch's alone is drawn from, which costs a fifth."""
        self._own, self._rngs = own, [*([torch_rng()] if from_torch else process_rngs(in_memory=True)), *own]
        self.begun = self._states(own)
        self._seed, self._inside = seed, False
        self._start: list[Any] = []
        self._inner: list[Any] = []
        """Empty until something is drawn."""

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the context, all generators have the states of this epoch; afterwards, their former states."""
        if self._inside:
            yield
            return
        outer, self._inside = self._states(self._rngs), True
        try:
            if self._inner:
                self._restore(self._rngs, self._inner)
            else:
                self._begin()
            yield
        finally:
            self._inner, self._inside = self._states(self._rngs), False
            self._restore(self._rngs, outer)

    @contextmanager
    def drawing_again(self) -> Iterator[None]:
        """Within the context, the generators have the states in which the epoch began; they do not advance it."""
        with self.drawing():
            standing = self._states(self._rngs)
            self._restore(self._rngs, self._start)
            try:
                yield
            finally:
                self._restore(self._rngs, standing)

    def settle(self, complete: bool) -> None:
        """Advance the `own` generators to the next epoch, except those that the user has reseeded or used meanwhile.

        `complete`: all items were drawn, so they continue from there, as in plain PyTorch. Otherwise ranks may have
        drawn different numbers of items, and they are seeded from the state in which the epoch began.
        """
        ends = self._inner[len(self._inner) - len(self._own) :]
        for rng, begun, end in zip(self._own, self.begun, ends, strict=True):
            if digest(rng.read()) != digest(begun):
                continue
            if complete:
                rng.write(end)
            else:
                rng.seed(mix("unfinished", digest(begun)))

    def _begin(self) -> None:
        num_global = len(self._rngs) - len(self._own)
        for rng in self._rngs[:num_global]:
            rng.seed(self._seed)
        for rng, state in zip(self._own, self.begun, strict=True):
            rng.write(state)
        self._start = self._states(self._rngs)

    @staticmethod
    def _states(rngs: list[Rng]) -> list[Any]:
        return [rng.read() for rng in rngs]

    @staticmethod
    def _restore(rngs: list[Rng], states: list[Any]) -> None:
        for rng, state in zip(rngs, states, strict=True):
            rng.write(state)
