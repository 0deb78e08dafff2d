"""One seed for all random generators of a process, and seeds derived from it for ranks and workers.

Nothing is written to the environment: the generators themselves are the only state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

import torch

from fabric.strategies.data.rng import Rng, mix

_NUM_SEEDS = 2**32
"""NumPy's seeds have 32 bits."""


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed Python's `random`, NumPy and torch on every device with `seed`, from 0 to 2**32 - 1, and return it.

    The same call on every rank gives every rank the same random numbers, so models are initialised alike. Once a model
    is set up, ranks that read different data draw different numbers for dropout and augmentation, whether this is
    called before or after: see `Fabric.setup`.
    `workers`: a loader's workers are always seeded from torch's generator and the rank; False is an error.
    NumPy is seeded if it is imported; `import torch` imports it where it is installed.
    Raises: TypeError: `seed` is not an int; None is not replaced by a random seed. ValueError: out of range.
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
            f"`seed_everything({seed}, workers={workers})`: a DataLoader's workers are always seeded from the "
            "generator of their rank. Leave `workers` out, and draw what must not be reproducible in a "
            "`worker_init_fn`."
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
    """A seed for `seed_everything`, from 0 to 2**32 - 1, which depends on every number in `path`.

    The path may be a rank, an epoch, a worker. The result is the same in every process, Python and platform. Neighbours
    (`seed + 1`, `rank + 1`) are uncorrelated; among a thousand seeds, two are equal with probability 1 in 8600.
    Source: BLAKE2b (RFC 7693) as a mixing function, in place of SplitMix64 (Steele et al., OOPSLA 2014).
    """
    return mix("seed", seed, *path) % _NUM_SEEDS


def device_rngs(devices: Iterable[torch.device]) -> list[Rng]:
    """The generators of devices that are in use, in their order. The CPU's is a generator of the process."""
    return [rng for device in devices for rng in _device_rng(device)]


def _device_rng(device: torch.device) -> list[Rng]:
    if device.type == "cpu":
        return []
    if device.type == "xla":
        from fabric.strategies.xla.device import device_rng

        return [Rng(*device_rng())]
    module = torch.get_device_module(device)
    if device.type == "mps":  # one device; its functions take no index
        return [Rng(module.get_rng_state, module.set_rng_state, module.manual_seed)]
    index = device.index or 0
    return [
        Rng(
            read=lambda: module.get_rng_state(index),
            write=lambda state: module.set_rng_state(state, index),
            seed=module.manual_seed_all,
        )
    ]
