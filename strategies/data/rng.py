"""Random generators, and the states from which the order of an epoch is drawn.

In one process the order is drawn from the generators of torch, `random`, numpy and the sampler, as they are.
Ranks that share an order draw it from copies of rank 0's states: the copies replace the states of the generators during
a draw, and the former states are restored. That costs about 40 us per draw, and 0.6 ms where numpy is imported; for
torch's own samplers, 8 us. So indices are drawn in chunks. Another thread that draws at the same time sees the replaced
states.
"""

import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fabric.strategies.tensors.generator_interface import Rng


def mix(*parts: object) -> int:
    """A seed of 63 bits, a hash of the `repr` of all parts: the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def torch_rng() -> Rng:
    """The global generator of torch for the CPU."""
    generator = torch.default_generator
    return Rng(generator.get_state, generator.set_state, generator.manual_seed)


def process_rngs() -> dict[str, Rng]:
    """The global generators of torch (CPU), of `random`, and of numpy if it is imported."""
    found = {"torch": torch_rng(), "python": Rng(random.getstate, random.setstate, random.seed)}
    numpy = sys.modules.get("numpy")
    return found if numpy is None else found | {"numpy": _numpys(numpy.random)}


@contextmanager
def preserved_rngs(own: Sequence[Rng] = ()) -> Iterator[None]:
    """Restore the states of the global generators, and of `own`, when the context ends."""
    rngs = [*process_rngs().values(), *own]
    states = read_all(rngs)
    try:
        yield
    finally:
        write_all(rngs, states)


def seed_process(seed: int) -> None:
    """Seed the global generators."""
    for rng in process_rngs().values():
        rng.seed(seed)


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
class SharedRngs:
    """The states that the process's generators would have in one process, for all loaders whose data the ranks split.

    # Note [Rank 0 leads]
    Each loader moves the states when torch would draw: at `iter`, and when its sampler first draws. An epoch that is
    left after one batch, without a backward pass, puts them back. A rank that iterates a loader alone has other states
    afterwards. So, once several loaders were set up, all ranks draw an epoch of training from rank 0's states at the
    sampler's first draw: the order of one process that does what rank 0 does. Rank 0 puts its states into the store and
    does not wait. An evaluation may run on some ranks only, so no rank may wait there: an evaluation that shuffles
    draws from the states after the latest epoch of training and its own epochs since then.
    """

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.agreed = self.states
        """The states after the latest set-up or epoch of training: equal on all ranks."""
        self.written: dict[str, str] = {}
        """Digests of the states that this process's generators were last set to; "" if the program has drawn since."""
        self.num_loaders, self._num_alike = 0, -1

    def offer(self, process: Mapping[str, Rng]) -> tuple[int, dict[str, Any]]:
        """A seed, and the states of this process's generators, from which all ranks draw if this is rank 0."""
        self.follow()
        states = {name: rng.read() for name, rng in process.items()}
        is_used = any(name in self.written and self.written[name] != _hex(state) for name, state in states.items())
        self._num_alike = 0 if is_used else self._num_alike + 1
        return mix("loader", self._num_alike, digest(states["torch"])), states

    def agree(self, states: Mapping[str, Any], written: Mapping[str, str] | None = None) -> None:
        """Go on from states that all ranks have. `written`: as in the saved run."""
        self.states = self.agreed = {**self.states, **states}
        self.written |= {name: _hex(state) for name, state in states.items()} if written is None else written

    def follow(self) -> None:
        """Move those generators of this process that nothing else has drawn from."""
        rngs = process_rngs()
        for name, written in self.written.items():
            is_unused = _hex(rngs[name].read()) == written
            if is_unused:
                rngs[name].write(self.states[name])
            self.written[name] = _hex(self.states[name]) if is_unused else ""


def _hex(state: Any) -> str:
    return digest(state).hex()


@final
@dataclass(eq=False)
class EpochRngs:
    """The random states from which the order of an epoch is drawn, of the process's generators and the sampler's `own`.

    Without `shared` and `start`, the order is drawn from the generators as they are. Otherwise the generators have
    other states while the order is drawn: `start`, in an epoch that is resumed; `source`, if the epoch has states of
    its own; or else the states of `shared`, until the sampler first draws, when `lead` replaces them by rank 0's.
    """

    process: Mapping[str, Rng]
    own: Sequence[Rng]
    start: list[Any] | None = None
    begun: list[Any] | None = None
    """The states at the sampler's first draw, once it has drawn; from the beginning in an epoch that is resumed."""
    shared: SharedRngs | None = None
    source: Mapping[str, Any] | None = None
    lead: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    had_shared: bool = False
    """Whether `shared` had the states of the resumed epoch."""
    _inside: bool = False
    _is_released: bool = False
    _at: object = None
    """The states of `shared`, as this epoch has left them."""

    def __post_init__(self) -> None:
        shared, source, is_new = self.shared, self.source, self.start is None
        self._names, self._rngs = [*self.process], [*self.process.values(), *self.own]
        self.is_resumed = self.begun is not None
        self._is_joint = self._begins_jointly = shared is not None and is_new and source is None
        if shared is not None:
            self._opened = shared.states, shared.agreed
            if (is_new or self.had_shared) and (source is None or source is shared.states):
                self._at = shared.states
            states = shared.states if source is None else source
            self.start = self.start or [*(states[name] for name in self._names), *read_all(self.own)]
        self._states = self.start

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the context, all generators have the states of this epoch; afterwards, their former states."""
        if self._states is None or self._inside:
            yield
            return
        if self._is_joint and self.shared is not None:
            self._at = self.shared.states
            self._states = [*map(self.shared.states.__getitem__, self._names), *self.own_states]
        outer, self._inside = read_all(self._rngs), True
        write_all(self._rngs, self._states)
        try:
            yield
        finally:
            self._inside = False
            self.move(read_all(self._rngs))
            write_all(self._rngs, outer)
            if self._is_released:
                self.release()

    def move(self, states: list[Any]) -> None:
        """Go on from these states. `shared` goes along, unless another loader has moved it since."""
        self._states, shared = states, self.shared
        if shared is None or not self.follows:
            return
        process = dict(zip(self._names, states, strict=False))
        if any(not _equal(state, shared.states[name]) for name, state in process.items()):
            self._at = shared.states = {**shared.states, **process}
        if self.lead is not None and not self._is_joint:
            shared.agreed = shared.states

    @property
    def follows(self) -> bool:
        """Whether `shared` is where this epoch is."""
        return self.shared is not None and self._at is self.shared.states

    def undo(self) -> None:
        """Put `shared` back to where the epoch began, unless another loader has moved it since."""
        if self.shared is not None and self.follows:
            self.shared.states, self.shared.agreed = self._opened

    def restart(self) -> None:
        """Go back to the states with which the epoch begins. Called within `drawing`."""
        if self.start is not None:
            write_all(self._rngs, self.start)
            self._is_joint = self._begins_jointly

    def begin(self) -> None:
        """Called within `drawing`, when the sampler is about to draw for the first time."""
        if self.is_resumed and self.begun is not None:
            write_all(self._rngs, self.begun)
        else:
            states = read_all(self._rngs)
            if self.lead is not None:
                led = self.lead(dict(zip(self._names, states, strict=False)))
                states[: len(led)] = [led[name] for name in self._names]
                write_all(self._rngs, states)
            self.begun = states
        self._is_joint = False

    def release(self) -> None:
        """From here on draw from the generators as they are; the sampler's own continue from this epoch's states."""
        self._is_released = True
        if self._states is not None and not self._inside:
            write_all(self.own, self.own_states)
            self._states = None

    @property
    def states(self) -> list[Any]:
        """The states that the generators have now in this epoch."""
        return self._states or []

    @property
    def own_states(self) -> list[Any]:
        """The states of the sampler's generators."""
        return self.states[len(self._names) :]

    @property
    def own_start(self) -> list[Any]:
        """The states of the sampler's generators when the epoch began."""
        return (self.start or [])[len(self._names) :]


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def read_all(rngs: Sequence[Rng]) -> list[Any]:
    """The states of these generators."""
    return [rng.read() for rng in rngs]


def write_all(rngs: Sequence[Rng], states: Sequence[Any]) -> None:
    """Set the states of these generators."""
    for rng, state in zip(rngs, states, strict=True):
        rng.write(state)
