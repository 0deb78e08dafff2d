"""One seed for every stream of random numbers in a process, and seeds derived from it for ranks and workers.

Nothing is written to the environment, and nothing is remembered: the streams themselves are the only state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fabric.strategies.data.rng import Rng, mix, process_rngs

_NUM_SEEDS = 2**32
"""NumPy takes 32 bits."""


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed Python's `random`, NumPy and torch on every device with `seed`, from 0 to 2**32 - 1, and give it back.

    The same call on every rank gives every rank the same streams: models are then initialised alike. Streams that
    differ from rank to rank, as dropout and augmentation want, begin by themselves once a model is set up: see
    `Fabric.setup`. Calling this before or after `setup` makes no difference to that.
    `workers`: a loader's workers are seeded from torch's stream and the rank, always; False is an error.
    NumPy is seeded where something has imported it; `import torch` does where it is installed.
    Raises: TypeError: `seed` is not an int, None included: none is drawn behind your back. ValueError: out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"`seed_everything({seed!r})`: the seed is a `{type(seed).__name__}`. Write an int from 0 to "
            f"{_NUM_SEEDS - 1}; for another one in each run, draw it yourself and log it."
        )
    if not 0 <= seed < _NUM_SEEDS:
        raise ValueError(f"`seed_everything({seed})`: the seed is out of range. Write 0 to {_NUM_SEEDS - 1}.")
    if not workers:
        raise ValueError(
            f"`seed_everything({seed}, workers={workers})`: a DataLoader's workers are always seeded from the stream "
            "of their rank. Leave `workers` out, and draw what must not be reproducible in a `worker_init_fn`."
        )
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch_xla" in sys.modules:
        from fabric.strategies.xla.device import seed_device

        seed_device()
    return seed


def derive_seed(seed: int, *path: int) -> int:
    """A seed for `seed_everything`, from 0 to 2**32 - 1, which depends on every number of the path.

    The path may be a rank, an epoch, a worker. The same in every process, Python and platform. Neighbours (`seed + 1`,
    `rank + 1`) have nothing in common; among a thousand seeds, the chance that two are equal is 1 in 8600.
    Source: BLAKE2b (RFC 7693) as a mixing function, in the place of SplitMix64 (Steele et al., OOPSLA 2014).
    """
    return mix("seed", seed, *path) % _NUM_SEEDS


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Whatever is seeded or drawn within it, Python's, NumPy's and torch's streams go on afterwards as if it had not
    been. An accelerator's streams are among them if it is in use already."""
    rngs = [*process_rngs(), *_accelerator_rngs()]
    states = [rng.read() for rng in rngs]
    try:
        yield
    finally:
        for rng, state in zip(rngs, states, strict=True):
            rng.write(state)


def device_rngs(devices: Iterable[torch.device]) -> list[Rng]:
    """The streams of devices that are in use, in their order; the CPU's is one of the process's."""
    return [rng for device in devices for rng in _device_rng(device)]


def _device_rng(device: torch.device) -> list[Rng]:
    if device.type == "cpu":
        return []
    if device.type == "xla":
        from fabric.strategies.xla.device import device_rng

        return [Rng(*device_rng())]
    module = torch.get_device_module(device)
    return [_rng_of(module, None if device.type == "mps" else device.index or 0)]


def _accelerator_rngs() -> list[Rng]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    if accelerator.type == "mps":
        return [_rng_of(module, None)]
    if not module.is_initialized():  # reading a state would open the device
        return []
    return [_rng_of(module, index) for index in range(module.device_count())]


def _rng_of(module: Any, index: int | None) -> Rng:
    if index is None:  # MPS: one device, which its functions do not take as an argument
        return Rng(module.get_rng_state, module.set_rng_state, module.manual_seed)
    return Rng(
        read=lambda: module.get_rng_state(index),
        write=lambda state: module.set_rng_state(state, index),
        seed=module.manual_seed_all,
    )
