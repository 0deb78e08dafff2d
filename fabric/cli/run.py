"""`fabric run`: check the words, put them where the script's `Fabric(...)` finds them, and become the script.

It translates and nothing else: no process is supervised here, no torch imported. `execve` keeps the process, so
signals, exit code and terminal are the script's own. Names of strategies and accelerators are left to the script,
which may register its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping

from fabric import spelling
from fabric.words import ProgramId, carry, module_main

_CHECKS: Mapping[str, Callable[[object, str], object]] = {
    "accelerator": spelling.read_word,
    "strategy": spelling.read_word,
    "devices": spelling.read_devices,
    "num_nodes": spelling.read_count,
    "node_rank": spelling.read_rank,
    "main_address": spelling.read_word,
    "main_port": spelling.read_port,
    "precision": spelling.read_precision_word,
    "launcher": spelling.read_launcher,
    "max_restarts": spelling.read_rank,
    "timeout_seconds": spelling.read_seconds,
    "say_after_seconds": spelling.read_seconds,
}


def run(parsed: argparse.Namespace) -> int:
    """Replace this process by the script. Does not return where it succeeds.

    Raises: ValueError, TypeError: a word is none, or there is no such script.
    """
    words = {name: getattr(parsed, name) for name in _CHECKS if getattr(parsed, name) is not None}
    for name, word in words.items():
        _CHECKS[name](word, f"--{name.replace('_', '-')} {word}")
    program = _program(parsed.script, parsed.script_arguments, is_module=parsed.module)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *program.arguments], {**os.environ, **carry(words, program)})


def _program(script: str, arguments: list[str], *, is_module: bool) -> ProgramId:
    if is_module:
        return ProgramId(arguments=("-m", script, *arguments), main=module_main(script))
    if not os.path.exists(script):
        raise ValueError(f"`{script}` is no file. Write the path of a script, or `-m` and the name of a module.")
    main = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
    return ProgramId(arguments=(script, *arguments), main=os.path.realpath(main))
