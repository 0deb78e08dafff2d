"""The user's program: how it was started, how to run it again, and how to import what is defined in it."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["script", "module", "command", "stdin", "interactive", "notebook"]
"""`python FILE`, `python -m NAME`, `python -c`, standard input, a prompt (`python -i` too), a notebook's kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A parsed command line of Python."""

    flags: tuple[str, ...]
    """Options of Python itself, such as `-X dev` and `-O`."""
    kind: Kind
    target: str
    """The script's path, or the module's name."""
    arguments: tuple[str, ...]

    @property
    def can_run_again(self) -> bool:
        """Whether another process can run the same program: there is a file."""
        return self.kind in ("script", "module")

    @property
    def is_interactive(self) -> bool:
        """Whether the session is interactive."""
        return self.kind in ("interactive", "notebook")

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
        }[self.kind]


def this_program() -> Program:
    """The program that runs in this process."""
    if is_interactive():
        kind: Kind = "notebook" if {"ipykernel", "IPython"} <= set(sys.modules) else "interactive"
        return Program(flags=(), kind=kind, target="", arguments=())
    return parse(sys.orig_argv)


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
        if word.startswith("--"):
            flags.append(word)
            if word == "--check-hash-based-pycs":
                flags.append(rest.pop(0))
            continue
        for position, letter in enumerate(word[1:], 1):
            if letter not in "cmWX":
                continue
            value = word[position + 1 :] or rest.pop(0)
            before = [word[:position]] if position > 1 else []
            if letter in "cm":
                kind = "command" if letter == "c" else "module"
                return Program(flags=(*flags, *before), kind=kind, target=value, arguments=tuple(rest))
            flags += [*before, f"-{letter}", value]
            break
        else:
            flags.append(word)
    return Program(flags=tuple(flags), kind="stdin", target="-", arguments=())


def run_again(program: Program) -> None:
    """Run a program in this process as Python would: in `__main__`, with its path and arguments."""
    main = sys.modules["__main__"]
    spec = None
    if program.kind == "module":
        spec = importlib.util.find_spec(program.target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program.target}.__main__")
        assert spec is not None
        assert spec.loader is not None
        assert spec.origin is not None
        path, code = spec.origin, spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    elif os.path.isdir(program.target) or not program.target.endswith(".py"):
        # A folder or an archive with a `__main__`, compiled code, a script without a suffix: left to runpy.
        sys.argv[:] = [program.target, *program.arguments]
        runpy.run_path(program.target, run_name="__main__")
        return
    else:
        path = program.target
        with open(path, "rb") as source:
            code = compile(source.read(), path, "exec", dont_inherit=True)
    sys.argv[:] = [path, *program.arguments]
    names = vars(main)
    names.update(__file__=path, __spec__=spec, __loader__=spec.loader if spec else None, __cached__=None)
    names["__package__"] = spec.parent if spec else None
    names["__doc__"] = None
    exec(code, names)


def file_of_main() -> str | None:
    """The file of `__main__`, for a process that has to import what is defined there; None if there is none."""
    if is_interactive():
        return None
    path = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.exists(path) else None


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
