"""The user's program: how it was started, how to run it again, and how to import what is defined in it."""

import builtins
import multiprocessing
import os
import re
import runpy
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from traceback import walk_stack
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["script", "module", "command", "stdin", "interactive", "notebook", "worker"]
"""`python FILE`, `python -m NAME`, `python -c`, standard input, a prompt (`python -i` too), a notebook's kernel, a
process that `multiprocessing` started."""
try:
    STARTED_IN = os.getcwd()
except FileNotFoundError:  # it was deleted
    STARTED_IN = os.sep
"""The working directory when this package was imported: paths of the command line are relative to it."""
NUM_THREADS: int = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0
"""Torch's number of threads at that import; 0: torch was not imported yet."""
_CALLERS = ("_pytest.", "unittest.", "doctest.", "concurrent.futures.", "multiprocessing.pool.")
"""Modules and packages that call a function of the program and continue after it."""
_WITH_VALUE = re.compile(r"-([^-cmWX]*)([cmWX])(.*)", re.DOTALL)
"""An option with a value, after others without one: `-um package`, `-Wignore`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A parsed command line of Python."""

    flags: tuple[str, ...]
    """Options of Python itself, such as `-X dev` and `-O`."""
    kind: Kind
    target: str
    """The script's path, or the module's name."""
    arguments: tuple[str, ...]
    file: str = ""
    """The script's absolute path; empty if there is none."""

    @property
    def can_run_again(self) -> bool:
        """Whether another process can run the same program: there is a file."""
        return self.kind in ("script", "module")

    @property
    def words(self) -> str:
        """How it was started, for error messages."""
        return {
            "script": f"`python {self.target}`",
            "module": f"`python -m {self.target}`",
            "command": "`python -c`",
            "stdin": "a program from stdin",
            "interactive": "an interactive session",
            "notebook": "a notebook",
            "worker": "a worker process of `multiprocessing`",
        }[self.kind]


def this_program() -> Program:
    """The program that runs in this process."""
    if is_interactive():
        kind: Kind = "notebook" if {"ipykernel", "IPython"} <= set(sys.modules) else "interactive"
        return Program(flags=(), kind=kind, target="", arguments=())
    file = imported_script()
    if file is not None:
        return Program(flags=(), kind="script", target=file, file=file, arguments=())
    program = parse(sys.orig_argv)
    if multiprocessing.parent_process() is not None:  # its command line, if it has one, is that of its parent
        return replace(program, kind="worker")
    return replace(program, file=file_of_main() or "") if program.kind == "script" else program


def imported_script() -> str | None:
    """The script that this process is importing for the functions in it, as `multiprocessing` and our ranks do; None if
    it does not."""
    codes = (each.f_code for each, _ in walk_stack(sys._getframe()) if each.f_globals.get("__name__") == "__mp_main__")
    return next((code.co_filename for code in codes if code.co_name == "<module>"), None)


def caller_that_continues() -> str | None:
    """The caller of this code that continues after it, and would do so in every rank; None: there is no such caller."""
    if is_interactive():
        return "an interactive session"
    if threading.current_thread() is not threading.main_thread():
        return f"the thread {threading.current_thread().name!r}"
    names = [f"{frame.f_globals.get('__name__')}." for frame, _ in walk_stack(sys._getframe())]
    found = (each for name in names for each in _CALLERS if name.startswith(each) and name != "unittest.mock.")
    return next(found, "").strip("_.") or None


def is_interactive() -> bool:
    """Whether the session is interactive: `python`, `python -i`, IPython, a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "get_ipython")


def parse(words: Sequence[str]) -> Program:
    """Parse a command line of Python, as described by `python --help`."""
    flags: list[str] = []
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if word == "-" or not word.startswith("-"):
            kind: Kind = "stdin" if word == "-" else "script"
            return Program(flags=tuple(flags), kind=kind, target=word, arguments=tuple(rest))
        with_value = _WITH_VALUE.fullmatch(word)
        if with_value is None:
            flags += [word, rest.pop(0)] if word == "--check-hash-based-pycs" else [word]
            continue
        before, letter, value = with_value.groups()
        value = value or rest.pop(0)
        flags += [f"-{before}"] if before else []
        if letter in "cm":
            kind = "command" if letter == "c" else "module"
            return Program(flags=tuple(flags), kind=kind, target=value, arguments=tuple(rest))
        flags += [f"-{letter}", value]
    return Program(flags=tuple(flags), kind="stdin", target="-", arguments=())


def run_again(program: Program) -> None:
    """Run a program in this process as Python would: in `__main__`, with its path and arguments."""
    sys.argv[:] = [program.target, *program.arguments]
    if program.kind == "module":
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program.file, run_name="__main__")


def file_of_main() -> str | None:
    """The file of `__main__`, for a process that has to import what is defined there; None if there is none."""
    if is_interactive():
        return None
    path = getattr(sys.modules["__main__"], "__file__", None)
    file = os.path.join(STARTED_IN, path or "")  # absolute already, unless `fabric run` has started it
    return file if path and os.path.exists(file) else None


def import_main(path: str, module: str | None) -> None:
    """Make `__main__` what it is in the launching process, without the block under `if __name__ == "__main__"`.

    The module is named as `multiprocessing` names it.
    """
    main = types.ModuleType("__mp_main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if module is not None:
        names = runpy.run_module(module, run_name="__mp_main__", alter_sys=True)
    else:
        names = runpy.run_path(path, run_name="__mp_main__")
    vars(main).update(names)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
