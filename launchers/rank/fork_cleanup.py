"""Buffers, exit functions and temporary files from before a fork stay with the launching process.

A forked rank has copies of all of them: buffers that are not flushed yet, functions registered with `atexit`, temporary
folders that delete themselves. Each copy would be written, run or deleted once more. So buffers are flushed before the
fork, and a rank disables its copies of the rest.
"""

from __future__ import annotations

import gc
from typing import Any

from fabric.launchers.process import interpreter


def flush_before_fork() -> list[Any]:
    """In the launching process: flush all buffers, so that no rank has a copy of their content; returns open files."""
    files = interpreter.open_files(gc.get_objects())
    interpreter.flush(files)
    return files


def disown(files: list[Any]) -> None:
    """In a rank: let nothing of what was open be written, run or deleted here, unless the rank itself asks for it."""
    interpreter.freeze(files)
    interpreter.forget_parent()
    for each in files:
        if isinstance(each, interpreter.TEMPORARY):
            each.delete = False
