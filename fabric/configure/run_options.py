"""How the options of `fabric run` reach the script's `Fabric(...)`: in one environment variable, for that program only.

Note [Which program the options are for]
A script may start other programs: a tokenizer, an evaluation, another training. They inherit its environment, but the
options are not meant for them. So the variable names its program, by command line and by main module, and every other
program ignores it. The command line identifies the program itself, also under a debugger or coverage, and ranks that
run the script again. The main module identifies its multiprocessing children, whose command line is Python's own. A
process id would match only the first process; with one variable per option, a program could inherit some of them.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

VARIABLE = "FABRIC_RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramId:
    """The program that a process runs."""

    arguments: tuple[str, ...]
    """The interpreter's command line, without the interpreter."""
    main: str | None
    """The real path of the script, `-m NAME` for a module, None for neither."""

    @classmethod
    def current(cls) -> "ProgramId":
        """The program of this process."""
        return cls(arguments=tuple(sys.orig_argv[1:]), main=_main_of(sys.modules["__main__"]))


def module_main(name: str) -> str:
    """`ProgramId.main` of a module; a package and its `__main__` are the same program."""
    return f"-m {name.removesuffix('.__main__')}"


def _main_of(module: ModuleType) -> str | None:
    if module.__spec__ is not None and module.__spec__.name != "__main__":
        return module_main(module.__spec__.name)
    path = getattr(module, "__file__", None)  # none at a prompt, under `-c`, in a notebook
    return os.path.realpath(path) if path is not None else None


def as_variable(options: Mapping[str, str | bool], program: ProgramId) -> dict[str, str]:
    """The variable in which `program` will find the options."""
    return {VARIABLE: json.dumps({"arguments": program.arguments, "main": program.main, "options": dict(options)})}


def options_in(environ: Mapping[str, str], program: ProgramId | None = None) -> dict[str, str | bool]:
    """The options that `fabric run` was given for this program (or for `program`), as typed."""
    if VARIABLE not in environ:
        return {}
    carried = json.loads(environ[VARIABLE])
    here = ProgramId.current() if program is None else program
    same_line = here.arguments == tuple(carried["arguments"])
    same_main = here.main is not None and here.main == carried["main"]
    return dict(carried["options"]) if same_line or same_main else {}


def program_of(script: str, arguments: list[str], *, is_module: bool) -> ProgramId:
    """The program of a command line. Raises: ValueError: there is no such script."""
    if is_module:
        return ProgramId(arguments=("-m", script, *arguments), main=module_main(script))
    if not os.path.exists(script):
        raise ValueError(f"`{script}` is not a file. Write the path of a script, or `-m` and the name of a module.")
    main = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
    return ProgramId(arguments=(script, *arguments), main=os.path.realpath(main))
