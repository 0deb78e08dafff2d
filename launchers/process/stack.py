"""Finds the user's line in a stack: the innermost frame outside of torch, backends, the standard library and fabric."""

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import walk_stack
from types import FrameType

LIBRARIES = ("torch", "deepspeed", "fairscale", "horovod", "torch_xla", "typing_extensions")
"""Modules through which a collective is called. Their lines tell nothing about the program."""
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_LAUNCHERS = Path(__file__).parents[1]
_PACKAGE = Path(sys.modules[__name__.partition(".")[0]].__file__ or "").parent
OURS = tuple(f"{folder}{os.sep}" for folder in (_LAUNCHERS, _LAUNCHERS.with_name("strategies"), _PACKAGE))
"""The folders of this package: siblings in the repository, and in a wheel two of them within the third."""
END = "the end of the program"
"""The line of a rank that closes its fabric."""
FORWARD = "forward of a module"
"""Stands before a line whose collectives are made by a module's hooks, such as a broadcast of its buffers."""
_CONTEXTS = ("loop/gather_parameters.py", "gathered"), ("collectives/rank_zero_broadcast.py", "rank_zero_first")
"""Generators of context managers that the methods of `Fabric` of the same names return."""
_FABRIC = str(_PACKAGE / "fabric.py"), str(_PACKAGE / "lightning" / "fabric.py")
_AT_EXIT = str(_PACKAGE / "session.py"), "_close_at_exit"


def users_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """The user's line among frames (file, line, function), innermost first: `train.py:12 in main`.

    What this line calls stands before it, if that is a method of `Fabric` or a module: `fabric.save, train.py:12 in
    main`. If no frame is the user's, it is the line of the outermost frame; empty without frames.
    """
    last: tuple[str, int, str] | None = None
    libraries, method, is_end = _folders(), "", False
    for last in frames:
        if not _is_library(last[0], libraries):
            break
        is_method = last[0] in _FABRIC and not last[2].startswith("_")
        if is_method or any(is_within([last], file, [name]) for file, name in _CONTEXTS):
            method = f"fabric.{last[2]}, "
        elif last[2] == "_call_impl":  # torch.nn.Module's
            method = f"{FORWARD}, "
        elif last[0].startswith(OURS):
            method = ""
        if (last[0], last[2]) == _AT_EXIT:
            return END
        is_end = is_end or (last[0] in _FABRIC and last[2] == "close")
    else:
        if is_end:
            return END
    return f"{method}{_short(last[0])}:{last[1]} in {last[2]}" if last is not None else ""


def frames_of(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """The stack of a thread, innermost first."""
    stack: Iterable[tuple[FrameType, int]] = walk_stack(frame) if frame is not None else ()
    return [(each.f_code.co_filename, line or 0, each.f_code.co_name) for each, line in stack]


def is_within(frames: Sequence[tuple[str, int, str]], ending: str, functions: Sequence[str]) -> bool:
    """Whether a frame runs one of these functions, in a file whose path has this ending."""
    return any(file.endswith(ending) and function in functions for file, _, function in frames)


def _folders() -> tuple[str, ...]:
    """The folders of the loaded libraries."""
    folders = list(OURS)
    for name in LIBRARIES:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None:
            folders.append(os.path.dirname(file) + os.sep if file.endswith("__init__.py") else file)
    return tuple(folders)


def _is_library(file: str, libraries: tuple[str, ...]) -> bool:
    if file.startswith("<frozen"):
        return True
    return file.startswith(libraries) or (file.startswith(_STANDARD) and "site-packages" not in file)


def _short(file: str) -> str:
    """The path, relative to the working directory if it is inside."""
    try:
        relative = os.path.relpath(file) if os.path.isabs(file) else file
    except (OSError, ValueError):  # the working directory was deleted, or is on another drive
        return file
    return file if relative.startswith("..") else relative
