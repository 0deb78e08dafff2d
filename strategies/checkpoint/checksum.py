"""CRC-32, computed by the `isal` package if it is installed, else by zlib.

`isal` returns the same numbers with the processor's carry-less multiplication: 10.3 GiB/s against 3.4 on one core of an
AMD EPYC. With zlib, checksums take as long as the copy when a checkpoint is loaded from the page cache.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Protocol

from fabric.strategies.checkpoint.storage import Buffer


class Crc32(Protocol):
    """`zlib.crc32`, or a function that returns the same numbers."""

    def __call__(self, data: Buffer, value: int = 0, /) -> int: ...


def crc32(block: Buffer, running: int = 0) -> int:
    """The CRC-32 of the bytes, continued from `running`. Releases the GIL."""
    return _fastest()(block, running)


@cache
def _fastest() -> Crc32:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    fastest: Crc32 = isal_zlib.crc32
    return fastest
