"""What a run of `fabric verify` records, and how a process learns that it is recorded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The record that one run writes. Passed to the program with the options of `fabric run`."""

    path: str
    """The file that rank 0 writes."""
    num_steps: int
    """After so many steps of each optimizer the program ends."""
    in_place_of: int | None = None
    """For the reference: one process, which reads the batches of so many ranks as one; None: the run as asked."""
    permuted: bool = False
    """Whether the samples of each batch are permuted: what changes then is rounding."""
    keeps_dropout: bool = False

    def as_option(self) -> str:
        """As one of the options that `fabric run` passes to a program."""
        return json.dumps(asdict(self))

    @classmethod
    def of_option(cls, option: str) -> Recording:
        """The inverse of `as_option`."""
        return cls(**json.loads(option))
