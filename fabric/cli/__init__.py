"""The command line: `fabric run` starts a script with options for its `Fabric(...)`, `fabric doctor` reports what this
machine can run, `fabric consolidate` exports a checkpoint, `fabric verify` compares a script with one process, and
`fabric explain` shows every setting, `fabric report` a page of a run.

Each command imports what it needs when it runs, so that `--help` starts without torch.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, final

from fabric.configure.parse import OPTIONS, flag


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code. 2: an option was wrong, and nothing was started."""
    parsed = parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    command = getattr(import_module(f"fabric.cli.{parsed.command}"), parsed.command)
    try:
        code: int = command(parsed)
    except (TypeError, ValueError) as error:
        print(f"fabric {parsed.command}: {error}", file=sys.stderr)
        return 2
    return code


def parser() -> argparse.ArgumentParser:
    """Every command and option."""
    whole = argparse.ArgumentParser(
        prog="fabric", description="Run PyTorch loops on any device and number of processes."
    )
    whole.add_argument("--version", action=_Version, help="show the versions of torchfabric, torch and Python")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", allow_abbrev=False, help="start a script, with options for its Fabric(...)"))
    _add_verify(
        commands.add_parser("verify", allow_abbrev=False, help="compare a script's numbers with those of one process")
    )
    _add_explain(commands.add_parser("explain", allow_abbrev=False, help="show every setting, and where it comes from"))
    report = commands.add_parser("report", help="one HTML page of a run, or of two side by side")
    report.add_argument("run", metavar="RUN", help="a folder of `fabric.monitor(folder=...)` or `log_dir`")
    report.add_argument("other", nargs="?", metavar="RUN", help="another one, for a page of both")
    report.add_argument("--out", metavar="FILE", help="by default report.html in the folder of the first run")
    doctor = commands.add_parser("doctor", help="show what this machine can run, and why not the rest")
    doctor.add_argument("--json", action="store_true", help="as JSON, for programs")
    doctor.add_argument("--strategies", action="store_true", help="what each strategy can and cannot do")
    _add_consolidate(commands.add_parser("consolidate", help="export a checkpoint as safetensors"))
    return whole


@final
class _Version(argparse.Action):
    """Reads the installed metadata, which imports neither package."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, whole: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import platform
        from importlib import metadata

        torch, ours = metadata.version("torch"), metadata.version("torchfabric")
        print(f"torchfabric {ours}, torch {torch}, Python {platform.python_version()}")
        whole.exit()


def _add_consolidate(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Write a module of the checkpoint PATH, saved by any strategy on any number of ranks, as safetensors to OUT: "
        "one file if that ends in .safetensors, otherwise a folder as transformers writes it. Starts no ranks."
    )
    command.add_argument("path", metavar="PATH", help="a checkpoint that `fabric.save` wrote")
    command.add_argument("out", metavar="OUT", help="a file FILE.safetensors, or a folder")
    command.add_argument("--name", metavar="NAME", help="the entry of the state, where several modules were saved")
    command.add_argument("--keys", metavar="REGEX", help="only tensors with this in their names")
    command.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="of each file in a folder: 500MB, 2GiB (default: 5GB)"
    )


def _add_run(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Start SCRIPT as `python SCRIPT` does. The options set arguments of its `Fabric(...)` that the script leaves "
        "at their defaults; it is an error if the script sets another value."
    )
    _add_options(command)


def _add_explain(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Show every setting of the first `Fabric(...)` of SCRIPT, its value, and where it comes from. SCRIPT runs "
        "until then, and starts no ranks. Without SCRIPT: the settings of `Fabric()` here, with these options."
    )
    _add_options(command, needs_script=False)


def _add_verify(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Run SCRIPT as `fabric run` does, and again in one process over the same global batches, and compare gradients "
        "and weights step by step. Exit code 0: equal within rounding. 1: they differ, or nothing was compared."
    )
    command.add_argument("--steps", type=int, default=8, metavar="N", help="steps of each optimizer (default: 8)")
    command.add_argument("--tolerance", type=float, metavar="T", help="relative; by default rounding is measured")
    command.add_argument("--against", metavar="WHAT", help="a record of --save, or a strategy, in place of one process")
    command.add_argument("--save", metavar="FILE", help="write the record of the run as asked")
    command.add_argument("--keep-dropout", action="store_true", help="leave layers of dropout on")
    command.add_argument("--json", action="store_true", help="as JSON, for programs")
    _add_options(command)


def _add_options(command: argparse.ArgumentParser, *, needs_script: bool = True) -> None:
    """The options for the script's `Fabric(...)`, the script, and its own arguments."""
    for name, option in OPTIONS.items():
        words = [flag(name), *(["--stop-grace"] if name == "stop_grace_seconds" else [])]
        if option.metavar is None:
            command.add_argument(*words, action="store_const", const=True, help=option.help)
        else:
            command.add_argument(*words, metavar=option.metavar, help=option.help)
    command.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in `python -m`")
    nargs = None if needs_script else "?"
    command.add_argument("script", metavar="SCRIPT", nargs=nargs, help="the script, or with -m the module")
    command.add_argument("script_arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
