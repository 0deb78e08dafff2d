"""`fabric run`: check the options, pass them to the script's `Fabric(...)` through the environment, and exec the
script.

It supervises no process and imports no torch. `execve` keeps the process, so signals, exit code and terminal are the
script's own. Names of strategies and accelerators are not checked here: the script may register its own.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from fabric.configure.parse import OPTIONS, flag
from fabric.configure.run_options import as_variable, program_of


def run(parsed: argparse.Namespace) -> NoReturn:
    """Replace this process by the script. Does not return if it succeeds.

    Raises: ValueError, TypeError: an option has a wrong value, or there is no such script.
    """
    start(parsed, options_of(parsed))


def start(parsed: argparse.Namespace, options: Mapping[str, str | bool]) -> NoReturn:
    """Replace this process by the script, with these options. Raises: ValueError: there is no such script."""
    program = program_of(parsed.script, parsed.script_arguments, is_module=parsed.module)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *program.arguments], {**os.environ, **as_variable(options, program)})


def options_of(parsed: argparse.Namespace) -> dict[str, str | bool]:
    """The options for the script's `Fabric(...)`, as typed. Raises: ValueError, TypeError: one has a wrong value."""
    options = {name: getattr(parsed, name) for name in OPTIONS if getattr(parsed, name) is not None}
    for name, word in options.items():
        OPTIONS[name].read(word, f"{flag(name)} {word}")
    return options
