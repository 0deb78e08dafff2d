"""Buffers, exit functions and temporary files from before a fork stay with the launching process.

A forked rank has copies of all of them: buffers that are not flushed yet, functions registered with `atexit`, temporary
folders that delete themselves. Each copy would be written, run or deleted once more. So buffers are flushed before the
fork, and a rank disables its copies of the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from fabric.launchers.process import interpreter

BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, logging.Handler)
"""What can hold bytes or log records back."""


@final
@dataclass(frozen=True, slots=True)
class Belongings:
    """Created in the launching process before the first fork, and disowned in each rank."""

    files: Sequence[Any]
    """All that can hold bytes or log records back, and temporary files."""

    @classmethod
    def written_out(cls) -> Belongings:
        """Flush buffers, so that no rank has a copy of their content."""
        return cls(write_out(gc.get_objects()))

    def disown(self) -> None:
        """In a rank: let nothing of it be run, written or deleted here."""
        freeze(self.files)
        interpreter.begin_anew(last=close_files)
        for file in _temporary(self.files):
            file.delete = file._closer.delete = False
        finalizers = [finalizer for finalizer in interpreter.finalizers() if finalizer.atexit]
        # The objects stay alive: their destructors, too, must run in the launching process alone.
        atexit.register(_detach, finalizers, [finalizer.peek() for finalizer in finalizers])
        for finalizer in finalizers:
            finalizer.atexit = False
            found = finalizer.peek()
            if found is not None and isinstance(found[0], tempfile.TemporaryDirectory):
                finalizer.detach()
                setattr(found[0], "cleanup", _nothing)  # noqa: B010  `with` calls it at its end


def write_out(objects: Iterable[Any]) -> list[Any]:
    """Flush the buffers of the standard streams, of the open files and log handlers among `objects`, and of C.

    Returns these, and open temporary files. Python's only list of open files is that of its garbage collector: 20 ms
    for the objects of torch, and 200 ms in a fork, which copies the memory of each object that it looks at.
    """
    for stream in (sys.stdout, sys.stderr):  # in a notebook, they may be objects of any class
        with contextlib.suppress(Exception):
            stream.flush()
    buffered = _with_subclasses(BUFFERED)
    wanted = buffered | _with_subclasses((interpreter.TemporaryFile,))
    found = [each for each in objects if type(each) in wanted]
    for each in found:
        if type(each) in buffered:
            with contextlib.suppress(Exception):  # closed, full, or an error of a log handler: raised again on close
                each.flush()
    ctypes.CDLL(None).fflush(None)
    return found


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    return {kind for one in kinds for kind in (one, *_with_subclasses(one.__subclasses__()))}


def _temporary(files: Iterable[Any]) -> list[Any]:
    kinds = _with_subclasses((interpreter.TemporaryFile,))
    return [file for file in files if type(file) in kinds]


_frozen: list[tuple[list[weakref.ref[Any]], object]] = []
"""Files that were open at `freeze`, and an object made after it, which is found unless all was frozen once more."""


def freeze(files: Sequence[Any] = ()) -> None:
    """Leave all objects of now, `files` are the open ones, out of collections and of what `close_files` looks through.

    For a process that is a fork, or forks: looking at an object copies its memory.
    """
    gc.freeze()
    _frozen[:] = [([weakref.ref(file) for file in files], [])]


def close_files() -> None:
    """Flush open files, and delete temporary ones, at the end of a process in which destructors do not run.

    They do not run if the process ends by `os._exit`, or without Python's last garbage collection, which this omits.
    """
    objects = gc.get_objects()
    files, made_after = _frozen[-1] if _frozen else ([], None)
    if not any(each is made_after for each in objects):
        gc.unfreeze()
        objects = gc.get_objects()
    for file in _temporary(write_out([*(file() for file in files), *objects])):
        with contextlib.suppress(OSError):
            file.close()
    # Python's last collection looks at every object of every loaded module once more: 0.3 s of the 0.4 s in which a
    # process with torch ends, for memory that goes back to the system anyway.
    gc.freeze()


def _detach(finalizers: Sequence[weakref.finalize[Any, Any]], kept: Sequence[Any]) -> None:
    for finalizer in finalizers:
        finalizer.detach()


def _nothing() -> None:
    """Replaces `cleanup` of a rank's copy of a temporary folder."""
