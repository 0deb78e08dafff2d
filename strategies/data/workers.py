"""What a loader's worker process does first: end with its rank, and draw other random numbers than its peers.

torch seeds worker `i` of every rank alike when the ranks are seeded alike; augmentations would then repeat on every
rank. Over a map-style dataset each batch has a seed of its own besides: see `SeededDataset`.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, final

from torch.utils.data import get_worker_info

from fabric.strategies.data.iterable import SharedStream
from fabric.strategies.data.rng import mix, process_rngs
from fabric.strategies.data.seeded_dataset import SeededDataset

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@final
class WorkerStart:
    """The `worker_init_fn` of a loader's copy; calls the user's own last."""

    def __init__(self, share_index: int, init: Callable[[int], Any] | None) -> None:
        self.share_index, self.init = share_index, init
        self.ends_with_parent = True

    def starting(self) -> None:
        """Say, in the thread that is about to start workers, that it is about to.

        Linux ends a child with the thread that started it, not with the process: only the main thread lives as long.
        """
        self.ends_with_parent = threading.current_thread() is threading.main_thread()

    def __call__(self, worker_id: int) -> None:
        if self.ends_with_parent and sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        info = get_worker_info()
        assert info is not None
        # WorkerInfo guards its attributes, and users read both in their own `worker_init_fn`.
        if isinstance(info.dataset, (SharedStream, SeededDataset)):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.share_index:
            seed = mix(info.seed, self.share_index)
            object.__setattr__(info, "seed", seed)
            for rng in process_rngs():
                rng.seed(seed)
        if self.init is not None:
            self.init(worker_id)
