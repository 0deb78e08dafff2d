"""`seed_everything` without a seed, and with `verbose`."""

import fabric.loop.seed
from fabric.lightning.utilities.rank_zero import rank_zero_info


def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch, and return the seed; None is 0. No environment variable is read or written.

    `workers` has no effect: a DataLoader's workers are always seeded from torch's generator and their rank.
    `verbose`: says the seed, on rank zero, by `rank_zero_info`.
    Raises: ValueError: out of range.
    """
    chosen = fabric.loop.seed.seed_everything(0 if seed is None else int(seed))
    if verbose:
        rank_zero_info(f"Seed set to {chosen}")
    return chosen
