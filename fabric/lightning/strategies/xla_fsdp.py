"""`XLAFSDPStrategy`."""

from __future__ import annotations

from typing import Any

from fabric.lightning.strategies.parallel import ParallelStrategy
from fabric.lightning.unsupported import unsupported
from fabric.strategies.xla.fsdp import XLAFSDPStrategy as CoreXLAFSDP


class XLAFSDPStrategy(ParallelStrategy):
    """Fully sharded over all XLA devices of a host, by SPMD: the compiler places shards, so there are no options."""

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if value is not None:
                raise unsupported(f"XLAFSDPStrategy({name}={value!r})", "Leave it out: the compiler places the shards.")
        self._core = CoreXLAFSDP()
