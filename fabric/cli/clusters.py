"""For each external launcher: the command that starts ranks with it, and what is missing if it cannot run here.

It looks for the launcher's program. It starts nothing, and does not check whether a cluster answers.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec

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
    if start.program is None:
        return None if start.variable is None else f"`{start.variable}` is not set here: {start.otherwise}."
    if shutil.which(start.program, path=environ.get("PATH")) is not None:
        return None
    folder = sysconfig.get_path("scripts")
    if shutil.which(start.program, path=folder) is not None:
        return f"`{start.program}` is next to this Python, but not on PATH: `export PATH={folder}:$PATH`."
    return f"There is no `{start.program}` on PATH: {start.otherwise.removesuffix('.')}."
