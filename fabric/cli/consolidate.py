"""`fabric consolidate`: export a module of a checkpoint as safetensors, in this process."""

import argparse
import re
import sys

from fabric.strategies.checkpoint import consolidate as exporting
from fabric.strategies.checkpoint.errors import CheckpointError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def consolidate(parsed: argparse.Namespace) -> int:
    """Write the files, and print their names. Returns the exit code: 1 if the checkpoint could not be read.

    Raises: ValueError: an option cannot be parsed, or names something that is not in the checkpoint.
    """
    keys = _pattern(parsed.keys)
    try:
        written = exporting.consolidate(
            parsed.path,
            parsed.out,
            name=parsed.name,
            filter=None if keys is None else lambda key, _: keys.search(key) is not None,
            max_shard_bytes=num_bytes(parsed.max_shard_size),
        )
    except CheckpointError as error:
        print(f"fabric consolidate: {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


def num_bytes(size: str) -> int:
    """The bytes of a size such as 5GB or 512 MiB. Raises: ValueError: it is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) == 0:
        raise ValueError(f"`--max-shard-size {size}` is not a size. Write a number and a unit: 500MB, 5GB, 2GiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _pattern(words: str | None) -> re.Pattern[str] | None:
    try:
        return None if words is None else re.compile(words)
    except re.error as error:
        raise ValueError(f"`--keys {words}` is not a regular expression: {error}.") from error
