"""One seed for all random generators of a process.

Nothing is written to the environment: the generators themselves are the only state.
"""

import random
import sys

import torch

from fabric.strategies.accelerators.accelerator_registry import accelerators


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed Python's `random`, NumPy and torch on every device with `seed`, from 0 to 2**32 - 1, and return it.

    The same call on every rank gives every rank the same random numbers, so models are initialised alike. From the
    first batch of a prepared loader, or the first forward after `setup`, ranks that read different data draw different
    numbers for dropout and augmentation: see `Fabric.setup`.
    `workers`: a loader's workers are always seeded from torch's generator and the rank; False is an error.
    NumPy is seeded if it is imported; `import torch` imports it where it is installed.
    Raises: TypeError: the seed is None, which is not replaced by a random one. ValueError: out of range.
    """
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
    for accelerator in accelerators(installed=False):
        accelerator.seed()
    return seed
