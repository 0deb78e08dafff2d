"""What a checkpoint has of a run besides the user's objects: generators of every rank, loss scales, schedulers.

In a file it stands under one name of ours, beside the names that the user gave. How a file is written is not known
here. Saving gathers the generators: each rank receives about 10 KB from every other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fabric.strategies.checkpoint.state import Stateful

NAME = "fabric"
"""The entry of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Who has it. `gather`: gives every rank the objects of all ranks; all call it."""

    generators: Callable[[], dict[str, Any]]
    """This rank's states, by name."""
    restore_generators: Callable[[dict[str, Any]], None]
    scalers: Sequence[Stateful]
    schedulers: Sequence[Stateful]
    """Those that the user does not save under names of their own."""
    gather: Callable[[Any], list[Any]]
    share: tuple[int, int]
    """Which part of the data this rank reads, and of how many. Ranks with the same one draw the same numbers."""
    report: Callable[[str], None]

    def read(self) -> dict[str, Any]:
        """The entry. Ranks: all call it."""
        return {
            "generators": self.gather({"share": list(self.share), **self.generators()}),
            "scalers": [scaler.state_dict() for scaler in self.scalers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def write(self, entry: Mapping[str, Any] | None) -> None:
        """Go on from the entry; None: the file has none, and that is said."""
        if entry is None:
            self.report(
                "The checkpoint has no random generators, loss scales and schedulers, as `fabric.save` writes them: "
                "those of this run stay as they are, and it does not go on exactly as the one that was saved."
            )
            return
        for kind, objects in (("scalers", self.scalers), ("schedulers", self.schedulers)):
            if len(entry[kind]) == len(objects):
                for each, state in zip(objects, entry[kind], strict=True):
                    each.load_state_dict(state)
            elif objects:
                self.report(
                    f"The checkpoint has {len(entry[kind])} {_WORDS[kind]}, and this run has {len(objects)}: they stay "
                    "as they are."
                )
        states = entry["generators"]
        # Where the data was shared out otherwise, all go on as rank 0 did, and draw apart once they draw.
        self.restore_generators(next((each for each in states if each["share"] == list(self.share)), states[0]))


_WORDS = {"scalers": "loss scales", "schedulers": "schedulers that were given to `setup`"}
