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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


def process_rngs() -> list[Rng]:
    """The global generators of torch (CPU), of `random`, and of numpy if it is imported."""
    found = [torch_rng(), Rng(random.getstate, random.setstate, random.seed)]
    numpy = sys.modules.get("numpy")
    return found if numpy is None else [*found, _numpys(numpy.random)]


@contextmanager
def preserved_rngs(rngs: list[Rng] | None = None) -> Iterator[None]:
    """Restore the states of these generators (None: of the global ones) when the context ends."""
    rngs = process_rngs() if rngs is None else rngs
    states = _states(rngs)
    try:
        yield
    finally:
        _restore(rngs, states)


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
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return _numpys(value)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator

        def write(state: Any) -> None:
            bits.state = state

        return Rng(lambda: _without_arrays(bits.state), write, lambda seed: write(type(bits)(seed).state))
    return None


def _numpys(owner: Any) -> Rng:
    """A generator of numpy; `owner`: the module `numpy.random`, or a `RandomState`."""
    return Rng(
        read=lambda: _without_arrays(owner.get_state(legacy=False)),
        write=owner.set_state,
        seed=lambda seed: owner.seed(seed % 2**32),
    )


def _without_arrays(state: Any) -> Any:
    """The state of a generator of numpy with lists instead of arrays, which a checkpoint does not hold."""
    if isinstance(state, dict):
        return {key: _without_arrays(entry) for key, entry in state.items()}
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

    def __init__(self, seed: int, own: Sequence[Rng] = (), *, from_torch: bool = False) -> None:
        """`from_torch`: of the global generators, torch's alone is drawn from, which costs a fifth."""
        self._global, self._own = [torch_rng()] if from_torch else process_rngs(), list(own)
        self._rngs = [*self._global, *own]
        self.begun = _states(self._own)
        self._seed, self._inside = seed, False
        self._inner: list[Any] = []
        """Empty until something is drawn."""

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the context, all generators have the states of this epoch; afterwards, their former states."""
        if self._inside:
            yield
            return
        outer, self._inside = _states(self._rngs), True
        try:
            if self._inner:
                _restore(self._rngs, self._inner)
            else:
                self._begin()
            yield
        finally:
            self._inner, self._inside = _states(self._rngs), False
            _restore(self._rngs, outer)

    def restart(self) -> None:
        """Go back to the states in which the epoch began."""
        self._inner = []
        if self._inside:
            self._begin()

    def settle(self, complete: bool) -> None:
        """Advance the `own` generators to the next epoch, except those that the user has reseeded or used meanwhile.

        `complete`: all items were drawn, so they continue from there, as in plain PyTorch. Otherwise ranks may have
        drawn different numbers of items, and they are seeded from the state in which the epoch began.
        """
        for rng, begun, end in zip(self._own, self.begun, self._inner[len(self._global) :], strict=True):
            if digest(rng.read()) != digest(begun):
                continue
            if complete:
                rng.write(end)
            else:
                rng.seed(mix("unfinished", digest(begun)))

    def _begin(self) -> None:
        for rng in self._global:
            rng.seed(self._seed)
        _restore(self._own, self.begun)


def _states(rngs: Sequence[Rng]) -> list[Any]:
    return [rng.read() for rng in rngs]


def _restore(rngs: Sequence[Rng], states: Sequence[Any]) -> None:
    for rng, state in zip(rngs, states, strict=True):
        rng.write(state)
