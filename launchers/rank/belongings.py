"""What was open before a fork belongs to the process that was started: written out before it, run and deleted by it.

A forked rank has copies of everything: of buffers that wait to be written, of functions registered with `atexit`, of
temporary folders that delete themselves. Each copy would write, run or delete once more. So buffers are written before
the fork, and a rank disowns the rest.
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
    """Taken in the launching process before the first fork, disowned in each rank."""

    temporary_files: Sequence[Any]

    @classmethod
    def written_out(cls) -> Belongings:
        """Write what waits in buffers, so that no rank has a copy of it."""
        return cls(write_out())

    def disown(self) -> None:
        """In a rank: nothing of it is run, written or deleted here."""
        interpreter.begin_anew(last=close_files)
        for file in self.temporary_files:
            file.delete = file._closer.delete = False
        finalizers = [finalizer for finalizer in interpreter.finalizers() if finalizer.atexit]
        # The objects stay alive: what happens when the last reference goes is the launching process's as well.
        atexit.register(_detach, finalizers, [finalizer.peek() for finalizer in finalizers])
        for finalizer in finalizers:
            finalizer.atexit = False
            found = finalizer.peek()
            if found is not None and isinstance(found[0], tempfile.TemporaryDirectory):
                finalizer.detach()
                setattr(found[0], "cleanup", _nothing)  # noqa: B010  `with` calls it at its end


def write_out() -> list[Any]:
    """Write what waits in buffers: of the standard streams, of open files, of log handlers and of C.

    Gives the open temporary files. Python has no list of open files but that of its garbage collector: 20 ms for the
    objects of torch.
    """
    for stream in (sys.stdout, sys.stderr):  # objects of anybody's, in a notebook
        with contextlib.suppress(Exception):
            stream.flush()
    buffered, temporary = _with_subclasses(BUFFERED), _with_subclasses((interpreter.TemporaryFile,))
    wanted = buffered | temporary
    found = [each for each in gc.get_objects() if type(each) in wanted]
    for each in found:
        if type(each) in buffered:
            with contextlib.suppress(Exception):  # closed, full, or a log handler's own: whoever closes it is told
                each.flush()
    ctypes.CDLL(None).fflush(None)
    return [each for each in found if type(each) in temporary]


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    return {kind for one in kinds for kind in (one, *_with_subclasses(one.__subclasses__()))}


def close_files() -> None:
    """Do what destructors do for open files at the end of a process in which they do not run: nothing written is lost.

    They do not run where the process ends without Python's own end, or where Python's last collection is left out.
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
    """What a rank's copy of a temporary folder does in the place of deleting it."""
