"""SLURM's short form for the names of hosts: `gpu[001-003,007],login`. Read for its first host and their number."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_PART = re.compile(r"(?:[^,\[\]\s]|\[[\d,-]+\])+")
"""What stands between two commas: plain letters, and brackets that may hold commas of their own."""
_BRACKETS = re.compile(r"\[([^\]]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostList:
    """What a list says. Hosts in between are not needed: SLURM numbers its nodes itself."""

    first: str
    num_hosts: int

    @classmethod
    def parse(cls, text: str) -> HostList:
        """Read a list. `n[1-2]-ib[0-1]` begins with `n1-ib0` and names four hosts.

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
    """The ranges within one pair of brackets: the first number as it is written, and how many numbers there are."""
    matches = [_RANGE.fullmatch(part) for part in inside.split(",")]
    counts = [(match[1], int(match[2] or match[1]) - int(match[1]) + 1) for match in matches if match is not None]
    if len(counts) < len(matches) or any(count < 1 for _, count in counts):
        raise _not_of_the_form(text)
    return counts


def _not_of_the_form(text: str) -> ValueError:
    return ValueError(f"{text!r} is not of SLURM's form for hosts, such as `gpu[001-003,007],login`.")
