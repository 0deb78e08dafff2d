"""For each external launcher: the command that starts ranks with it, and what is missing if it cannot run here.

It looks for the launcher's program and for the program's cluster configuration file. It starts nothing, and does not
check whether the cluster answers.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from fabric.launchers.environments import ENVIRONMENTS
from fabric.launchers.environments.environment import Start


def clusters(environ: Mapping[str, str]) -> list[dict[str, str | None]]:
    """Each cluster environment, in the order of detection; `why_not` is null if it can run here."""
    return [
        {
            "name": environment.name,
            "command": start.command,
            "why_not": None if environment.detect(environ) else _why_not(start, environ),
        }
        for environment in ENVIRONMENTS
        if (start := environment.start) is not None
    ]


def _why_not(start: Start, environ: Mapping[str, str]) -> str | None:
    if start.package is not None and find_spec(start.package) is None:
        return f"`{start.package}` is not installed: {start.otherwise}."
    if start.variable is not None and start.variable in environ:
        return None
    program = None if start.program is None else shutil.which(start.program, path=environ.get("PATH"))
    if start.program is not None and program is None:
        folder = sysconfig.get_path("scripts")
        if shutil.which(start.program, path=folder) is not None:
            return f"`{start.program}` is next to this Python, but not on PATH: `export PATH={folder}:$PATH`."
        return f"There is no `{start.program}` on PATH: {start.otherwise.removesuffix('.')}."
    if start.program is None and start.variable is not None:
        return f"`{start.variable}` is not set here: {start.otherwise}."
    if program is not None and start.files and not any(path.exists() for path in _paths(start, program, environ)):
        looked_for = ", ".join(start.files)
        return f"`{start.program}` is here, but has no cluster configuration (none of {looked_for}): {start.cluster}."
    return None


def _paths(start: Start, program: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """Where the program looks for its cluster configuration."""
    for words in start.files:
        if words.startswith("$"):
            yield from (Path(path) for path in environ.get(words[1:], "").split(os.pathsep) if path)
        elif words.startswith("~"):
            yield Path(environ.get("HOME", "/"), words[2:])
        else:
            yield Path(words.replace("PREFIX", str(Path(program).resolve().parent.parent)))
