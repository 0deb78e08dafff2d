"""What a checkpoint contains of a run besides the user's objects.

Random generators, loss scales, schedulers, numbers of steps, and the positions of data loaders. It is one entry of the
checkpoint, next to the user's. Knows no file format. Saving gathers the states of the generators: each rank receives
about 10 KB from every other. Of the tensors in positions only the shapes are sent: each rank writes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.strategies.checkpoint.state import Stateful
from fabric.strategies.checkpoint.stored import in_memory
from fabric.strategies.checkpoint.tensor_shards import of_other_rank, of_rank

NAME = "fabric"
"""The name of the entry in a checkpoint."""


class Positions(Protocol):
    """The positions of the data loaders of a run."""

    def read(self) -> list[Any]:
        """Those of this rank. Ranks: each on its own."""

    def merged(self, of_ranks: list[list[Any]]) -> list[Any]:
        """What is saved, from the positions of all ranks. Ranks: each on its own."""

    def write(self, saved: list[Any]) -> None:
        """Restore what `merged` returned, with a `Stored` for each tensor. Ranks: all call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Reads the state of the run, and restores it. `gather`: gives every rank the objects of all ranks; all call it."""

    generators: Callable[[], dict[str, Any]]
    """Returns the states of this rank's generators, by name."""
    restore_generators: Callable[[dict[str, Any]], None]
    scalers: Sequence[Stateful]
    schedulers: Sequence[Stateful]
    """Those that the user does not save under names of their own."""
    steps: Mapping[str, Stateful]
    """The number of steps of each optimizer that is saved, by its name in the user's state."""
    loaders: Positions
    """Of the loaders that the user does not save under names of their own."""
    rank: int
    gather: Callable[[Any], list[Any]]
    share: tuple[int, int]
    """Index of the part of the data that this rank reads, and the number of parts. Ranks with the same part draw the
    same random numbers."""
    report: Callable[[str], None]

    def read(self, *, gathered: bool = False) -> dict[str, Any]:
        """The entry to save; `gathered`: whole on every rank, otherwise with `TensorShards`. Ranks: all call it."""
        own, read = {"share": list(self.share), **self.generators()}, self.loaders.read()
        of_ranks = self.gather((own, read if gathered else of_other_rank(read)))
        positions = [each for _, each in of_ranks]
        if not gathered:
            positions[self.rank] = of_rank(self.rank, read)
        return {
            "generators": [generators for generators, _ in of_ranks],
            "loaders": self.loaders.merged(positions),
            "steps": {name: counter.state_dict() for name, counter in self.steps.items()},
            "scalers": [scaler.state_dict() for scaler in self.scalers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def write(self, entry: Mapping[str, Any] | None, *, resume_loaders: bool = True) -> None:
        """Restore the run from the entry, with a `Stored` for each tensor. Ranks: all call it.

        None: the checkpoint has no entry, which is reported.
        `resume_loaders=False`: loaders keep their positions.
        """
        if entry is None:
            self.report(
                "The checkpoint has no states of random generators, loss scales and schedulers, which `fabric.save` "
                "writes. Those of this run are unchanged, so it does not continue exactly like the run that was saved."
            )
            return
        for kind, objects in (("scalers", self.scalers), ("schedulers", self.schedulers)):
            if len(entry[kind]) == len(objects):
                for each, state in zip(objects, entry[kind], strict=True):
                    each.load_state_dict(in_memory(state))
            elif objects:
                self.report(
                    f"The checkpoint has {len(entry[kind])} {_WORDS[kind]}, but this run has {len(objects)}: they are "
                    "unchanged."
                )
        saved = entry.get("steps", {})  # missing in checkpoints of older releases, as the loaders are
        for name in self.steps.keys() & saved.keys():
            self.steps[name].load_state_dict(in_memory(saved[name]))
        if resume_loaders:
            self.loaders.write(entry.get("loaders", []))
        states = entry["generators"]
        # If the data was partitioned differently, ranks without a state of their own continue from that of rank 0.
        own = next((each for each in states if each["share"] == list(self.share)), states[0])
        self.restore_generators(in_memory(own))


_WORDS = {"scalers": "loss scales", "schedulers": "schedulers that were passed to `setup`"}
