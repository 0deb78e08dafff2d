"""`fabric explain`: every setting of a script's `Fabric(...)`, its value, and where it comes from."""

import argparse
import os

from fabric.cli.run import options_of, start
from fabric.configure.explain import configure
from fabric.configure.request import Request
from fabric.configure.run_options import ProgramId, as_variable


def explain(parsed: argparse.Namespace) -> int:
    """Run the script until it has made its first fabric, which prints the table and ends the program.

    Without a script, make a fabric without arguments here. Raises: ValueError, TypeError: as `Fabric(...)`.
    """
    options = {**options_of(parsed), "explain": True}
    if parsed.script is not None:
        start(parsed, options)
    environ = {**os.environ, **as_variable(options, ProgramId.current())}
    configure(Request.build({}, environ), environ)
    return 0
