"""How the words of `fabric run` reach the script's `Fabric(...)`: in one environment variable, for that program only.

Note [Whose words they are]
A script may start others: a tokenizer, an evaluation, another training. They inherit its environment, and the words
were not said to them. So the variable names the program it was written for, by its command line and by its main
module, and every other program passes over it. The command line serves the program itself, under a debugger or
coverage too, and ranks that run the script again. The main module serves its multiprocessing children, whose command
line is Python's own. A process id would miss all but the first; one variable per word could arrive by halves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

VARIABLE = "FABRIC_RUN"

_BY_HAND = {"main_address": "MASTER_ADDR", "main_port": "MASTER_PORT", "node_rank": "NODE_RANK"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramId:
    """Which program a process runs."""

    arguments: tuple[str, ...]
    """The interpreter's command line, without the interpreter."""
    main: str | None
    """The real path of the script, `-m NAME` for a module, None where there is neither."""

    @classmethod
    def current(cls) -> ProgramId:
        """The program of this process."""
        return cls(arguments=tuple(sys.orig_argv[1:]), main=_main_of(sys.modules["__main__"]))


def module_main(name: str) -> str:
    """What `ProgramId.main` is for a module; a package and its `__main__` are the same program."""
    return f"-m {name.removesuffix('.__main__')}"


def _main_of(module: ModuleType) -> str | None:
    if module.__spec__ is not None and module.__spec__.name != "__main__":
        return module_main(module.__spec__.name)
    path = getattr(module, "__file__", None)  # none at a prompt, under `-c`, in a notebook
    return os.path.realpath(path) if path is not None else None


def carry(words: Mapping[str, str], program: ProgramId) -> dict[str, str]:
    """The variable by which `program` will find `words`."""
    return {VARIABLE: json.dumps({"arguments": program.arguments, "main": program.main, "words": dict(words)})}


def words(environ: Mapping[str, str], program: ProgramId | None = None) -> dict[str, str]:
    """The words that `fabric run` was given for this program (or for `program`), as they were typed."""
    if VARIABLE not in environ:
        return {}
    carried = json.loads(environ[VARIABLE])
    here = ProgramId.current() if program is None else program
    same_line = here.arguments == tuple(carried["arguments"])
    same_main = here.main is not None and here.main == carried["main"]
    return dict(carried["words"]) if same_line or same_main else {}


def place_by_hand(environ: Mapping[str, str]) -> dict[str, str]:
    """Where this node stands and where all meet, as whoever starts each node by hand writes it into the environment."""
    return {word: environ[variable] for word, variable in _BY_HAND.items() if environ.get(variable)}
