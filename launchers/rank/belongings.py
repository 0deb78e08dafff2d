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

from fabric.launchers.rank import interpreter

BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, logging.Handler)
"""What can hold bytes or log records back."""


@final
@dataclass(frozen=True, slots=True)
class Belongings:
    """Created in the launching process before the first fork, and disowned in each rank."""

    temporary_files: Sequence[Any]

    @classmethod
    def written_out(cls) -> Belongings:
        """Flush buffers, so that no rank has a copy of their content."""
        return cls(write_out())

    def disown(self) -> None:
        """In a rank: let nothing of it be run, written or deleted here."""
        interpreter.begin_anew(last=close_files)
        for file in self.temporary_files:
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


def write_out() -> list[Any]:
    """Flush the buffers of the standard streams, of open files, of log handlers and of C.

    Returns the open temporary files. Python's only list of open files is that of its garbage collector: 20 ms for the
    objects of torch.
    """
    for stream in (sys.stdout, sys.stderr):  # in a notebook, they may be objects of any class
        with contextlib.suppress(Exception):
            stream.flush()
    buffered, temporary = _with_subclasses(BUFFERED), _with_subclasses((interpreter.TemporaryFile,))
    wanted = buffered | temporary
    found = [each for each in gc.get_objects() if type(each) in wanted]
    for each in found:
        if type(each) in buffered:
            with contextlib.suppress(Exception):  # closed, full, or an error of a log handler: raised again on close
                each.flush()
    ctypes.CDLL(None).fflush(None)
    return [each for each in found if type(each) in temporary]


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    return {kind for one in kinds for kind in (one, *_with_subclasses(one.__subclasses__()))}


def close_files() -> None:
    """Close open files at the end of a process in which destructors do not run, so that nothing written is lost.

    They do not run if the process ends by `os._exit`, or if Python's last garbage collection is left out.
    """
    gc.unfreeze()
    for file in write_out():
        with contextlib.suppress(OSError):
            file.close()
    gc.freeze()


def _detach(finalizers: Sequence[weakref.finalize[Any, Any]], kept: Sequence[Any]) -> None:
    for finalizer in finalizers:
        finalizer.detach()


def _nothing() -> None:
    """Replaces `cleanup` of a rank's copy of a temporary folder."""
