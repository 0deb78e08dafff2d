"""The directories of runs: `root/name/version_0`, `version_1` and so on."""

from __future__ import annotations

from pathlib import Path


def make_run_directory(root: Path, name: str, version: int | str | None) -> Path:
    """Create the directory of a run. `version=None` takes the next free number; simultaneous runs get one each.

    Raises: FileExistsError: the version was given, and exists.
    """
    above = root / name
    while True:
        number = next_version(above) if version is None else version
        directory = above / (f"version_{number}" if isinstance(number, int) else number)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            if version is not None:
                raise
        else:
            return directory


def next_version(above: Path) -> int:
    """The number after the greatest of the directories `version_N` in `above`; 0 where there is none."""
    numbers = [path.name.removeprefix("version_") for path in above.glob("version_*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
