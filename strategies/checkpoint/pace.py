"""How the bytes of a file reach the disk: through the page cache, or past it.

A save that a loop waits for writes through the cache, and the disk begins with the first blocks, not at the flush.

A save in the background is to slow nothing else down, and writes past the cache, with rests. Otherwise the kernel
copies what is written, and threads of its own write it to the disk, which do not have the priority of the thread that
saves: on two cores, 1.5 GiB took 0.8 to 3.2 s of a processor, and take 0.1 s this way (O_DIRECT), as long by the clock.
The cache keeps what it has of other files, and gets nothing of this one. The rests leave the disk to others, such as a
data loader; on a virtual machine, the processors with which the host writes as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from typing import final

_REST = 8.0
"""For each second of writing."""
_MOST_REST_SECONDS = 60.0
"""In one save: a large one is not to take several times as long as it needs."""
PAGE_BYTES = 4096
"""Memory, offsets and lengths must be multiples of a block of the disk, which is this at most."""
_GATHERED_BYTES = 2**22
_WRITEBACK_BYTES = 2**22
"""The disk begins to write once so many bytes are in the cache."""
_SYNC_FILE_RANGE_WRITE = 2
"""Of `<fcntl.h>`."""


@final
class Pace:
    """The rests of one save, until somebody waits for it."""

    def __init__(self) -> None:
        self._is_awaited = threading.Event()
        self._left_seconds = _MOST_REST_SECONDS

    def hurry(self) -> None:
        """Rest no longer, from now on."""
        self._is_awaited.set()

    def limit(self, num_seconds: float) -> None:
        """Rest for so many seconds at most, from now on."""
        self._left_seconds = min(self._left_seconds, num_seconds)

    def rest(self, num_seconds: float) -> None:
        """Called after a write that took so many seconds."""
        rest = min(_REST * num_seconds, self._left_seconds)
        self._left_seconds -= rest
        self._is_awaited.wait(rest)


@final
class CachedWriter:
    """Writes blocks to the end of a new file, and has the disk begin to write them.

    Without that, the disk does nothing until the flush, unless much memory is dirty. How much it saves depends on the
    disk: where that was the limit of all, from nothing to 12 % of the time of two ranks that write 384 MiB each.
    """

    def __init__(self, handle: int) -> None:
        """`handle`: a descriptor of the file, which is empty."""
        self._handle = handle
        self._num_written = self._num_started = 0

    def write(self, block: memoryview) -> None:
        """Write the next bytes."""
        while block.nbytes:
            num_bytes = os.write(self._handle, block)
            self._num_written += num_bytes
            block = block[num_bytes:]
        if self._num_written - self._num_started >= _WRITEBACK_BYTES:
            start_writeback(self._handle, self._num_started, self._num_written - self._num_started)
            self._num_started = self._num_written

    def end(self) -> None:
        """Nothing is kept: the flush writes the rest."""


def start_writeback(handle: int, offset_bytes: int, num_bytes: int) -> bool:
    """Have the disk begin to write a part of a file, where the system can. Returns whether it does.

    It is no flush, and reports no error of the disk: `fsync` does. `posix_fadvise` begins as well, but then drops what
    is already written from the cache.
    """
    if sys.platform != "linux":
        return False
    offset, length = ctypes.c_int64(offset_bytes), ctypes.c_int64(num_bytes)
    return bool(ctypes.CDLL(None).sync_file_range(handle, offset, length, _SYNC_FILE_RANGE_WRITE) == 0)


@final
class DirectWriter:
    """Writes blocks of any length to the end of a new file. Where the file system cannot, they go through the cache.

    Those that begin at a page of memory when they belong at a page of the file are not copied.
    """

    def __init__(self, handle: int, pace: Pace) -> None:
        """`handle`: a descriptor of the file, which is empty."""
        self._handle, self._pace = handle, pace
        self._gathered = memoryview(mmap.mmap(-1, _GATHERED_BYTES))
        self._num_gathered = 0
        self._is_direct = False
        self._set_direct(True)

    def write(self, block: memoryview) -> None:
        """Write the next bytes; some may be kept until `end`."""
        while block.nbytes:
            pages = block.nbytes // PAGE_BYTES * PAGE_BYTES
            if pages and self._num_gathered % PAGE_BYTES == 0 and _is_at_page(block):
                self._write_gathered(self._num_gathered)
                self._write(block[:pages])
                block = block[pages:]
                continue
            size = min(block.nbytes, _GATHERED_BYTES - self._num_gathered)
            self._gathered[self._num_gathered : self._num_gathered + size] = block[:size]
            self._num_gathered += size
            block = block[size:]
            if self._num_gathered == _GATHERED_BYTES:
                self._write_gathered(_GATHERED_BYTES)

    def end(self) -> None:
        """Write what was kept. The last bytes, less than a page, go through the cache."""
        self._write_gathered(self._num_gathered // PAGE_BYTES * PAGE_BYTES)
        self._set_direct(False)
        self._write_gathered(self._num_gathered)

    def _write_gathered(self, num_bytes: int) -> None:
        self._write(self._gathered[:num_bytes])
        left = self._num_gathered - num_bytes
        self._gathered[:left] = self._gathered[num_bytes : self._num_gathered]
        self._num_gathered = left

    def _write(self, block: memoryview) -> None:
        while block.nbytes:
            begun = time.monotonic()
            try:
                block = block[os.write(self._handle, block) :]
                self._pace.rest(time.monotonic() - begun)
            except OSError as error:
                # Larger blocks, or a write that was cut short at a limit, which then says so.
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._set_direct(False)

    def _set_direct(self, is_direct: bool) -> None:
        if sys.platform != "linux":
            return
        import fcntl

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~os.O_DIRECT
        with contextlib.suppress(OSError):  # a file system without it
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
            self._is_direct = is_direct


def _is_at_page(block: memoryview) -> bool:
    return not block.readonly and ctypes.addressof(ctypes.c_byte.from_buffer(block)) % PAGE_BYTES == 0
