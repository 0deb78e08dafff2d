"""What a run was given, and what its machine can run: `run.json` in the folder of a run, written at each launch."""

import json
from pathlib import Path

from fabric.configure.abilities import report, with_every_accelerator
from fabric.configure.resolve import Resolved
from fabric.strategies.registered_names import Registration

NAME = "run.json"


def describe(folder: Path, resolved: Resolved) -> None:
    """Write the settings (as `fabric explain` shows them), and what `fabric doctor` says of the machine and of the
    strategy. One process calls it. Cost: a third of a second."""
    strategy = resolved.strategy
    name = type(strategy).__name__
    registration = Registration(name=name, make=lambda: strategy, description="that of the run")
    doctor = report(with_every_accelerator(resolved.machine), {name: registration})
    described = {"settings": [setting._asdict() for setting in resolved.settings], "doctor": doctor}
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{NAME}.new"
    beside.write_text(json.dumps(described, indent=1), encoding="utf-8")
    beside.replace(folder / NAME)
