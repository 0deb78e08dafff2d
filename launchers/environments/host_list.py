"""SLURM's short form of host names, `gpu[001-003,007],login`: its first host and the number of hosts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_PART = re.compile(r"(?:[^,\[\]\s]|\[[\d,-]+\])+")
"""The text between two commas; brackets may contain commas."""
_BRACKETS = re.compile(r"\[([^\]]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostList:
    """A parsed list. The other hosts are not needed: SLURM numbers its nodes itself."""

    first: str
    num_hosts: int

    @classmethod
    def parse(cls, text: str) -> HostList:
        """Parse a list. `n[1-2]-ib[0-1]` begins with `n1-ib0` and has four hosts.

        Raises: ValueError: it is not of SLURM's form.
        Source: the section on hostlist expressions in `man scontrol`; tests compare with `scontrol show hostnames`.
        """
        parts = _PART.findall(text)
        ranges = [[_read(inside, text) for inside in _BRACKETS.findall(part)] for part in parts]
        if not parts or ",".join(parts) != text:
            raise _not_of_the_form(text)
        firsts = iter([inside[0][0] for inside in ranges[0]])
        return cls(
            first=_BRACKETS.sub(lambda _: next(firsts), parts[0]),
            num_hosts=sum(math.prod(sum(count for _, count in inside) for inside in part) for part in ranges),
        )


def _read(inside: str, text: str) -> list[tuple[str, int]]:
    """The ranges in one pair of brackets: the first number as it is written, and how many numbers there are."""
    matches = [_RANGE.fullmatch(part) for part in inside.split(",")]
    counts = [(match[1], int(match[2] or match[1]) - int(match[1]) + 1) for match in matches if match is not None]
    if len(counts) < len(matches) or any(count < 1 for _, count in counts):
        raise _not_of_the_form(text)
    return counts


def _not_of_the_form(text: str) -> ValueError:
    return ValueError(f"{text!r} is not of SLURM's form for hosts, such as `gpu[001-003,007],login`.")
