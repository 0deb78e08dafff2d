"""Save a training step to files and repeat it: batches, random states at each batch, and weights.

The folder of a step has `weights`, a checkpoint of the models that were set up, and `rank-N.pt` for every rank, a file
of `torch.save` that `torch.load(path, weights_only=True)` reads. Every rank writes its own file: nothing is gathered.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fabric.checkpoints.run_state import generators_of, restore_generators
from fabric.strategies.checkpoint.errors import CheckpointError
from fabric.strategies.checkpoint.storage import Storage, storage_of
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.transfer import move
from fabric.strategies.runtime import Runtime

MAX_REPLAYS = 3
"""Number of steps that a run saves: once weights are not finite, all steps are alike."""
_CPU = torch.device("cpu")


@final
class Replays:
    """The batches since the last step, and the folder in which they are saved.

    `save_weights`: writes the models to a path; all ranks call it.
    """

    def __init__(self, runtime: Runtime, path: str | os.PathLike[str], save_weights: Callable[[str], object]) -> None:
        self._runtime, self._collective, self._folder = runtime, runtime.collective, storage_of(path)
        self._save_weights = save_weights
        self._given: list[tuple[Any, dict[str, Any]]] = []
        """Batches that the loop has received, and the random generators when it did."""
        self._num_written = 0
        self._has_stepped = False

    def note(self, batch: Any) -> None:
        """Called when the loop receives a batch, and again when `fabric.accumulate` passes on what it read ahead."""
        if self._has_stepped:
            self._given.clear()
            self._has_stepped = False
        self._given = [each for each in self._given if each[0] is not batch]
        self._given.append((batch, generators_of(self._runtime)))

    def note_step(self) -> None:
        """Called after a step: the next batch belongs to another one."""
        self._has_stepped = True

    def write(self, number: int, losses: Sequence[Tensor]) -> str | None:
        """Save step `number`; returns its path, or None if enough steps are saved. Ranks: all call it.

        Raises: CheckpointError: on every rank, if any could not write.
        """
        if self._num_written == MAX_REPLAYS:
            return None
        self._num_written += 1
        folder = self._folder.inside(f"step-{number}")
        rank = self._collective.rank
        entry = {
            "world_size": self._collective.size,
            "batches": [{"batch": _plain(batch), "generators": generators} for batch, generators in self._given],
            "losses": [loss.to(_CPU) for loss in losses],
        }
        for failed, problem in enumerate(self._collective.all_gather_object(_write(folder, rank, entry))):
            if problem:
                raise CheckpointError(f"{folder.path!r}: rank {failed}: {problem}", rank=failed)
        self._save_weights(f"{folder.path}/weights")
        return folder.path


def replay(
    runtime: Runtime,
    path: str | os.PathLike[str],
    rank: int | None,
    load_weights: Callable[[str], object],
) -> Iterator[Any]:
    """The implementation of `Fabric.replay`."""
    folder = storage_of(path)
    entry = _read(folder, runtime.collective, rank)
    load_weights(f"{folder.path}/weights")
    return _batches(entry, runtime)


def _read(folder: Storage, collective: Collective, rank: int | None) -> dict[str, Any]:
    """The file of a rank; None: of this rank."""
    entry: dict[str, Any] = torch.load(
        io.BytesIO(folder.read(_name(collective.rank if rank is None else rank))), weights_only=True
    )
    if rank is None and entry["world_size"] != collective.size:
        raise ValueError(
            f"`fabric.replay({folder.path!r})`: {entry['world_size']} ranks saved this step, and here are "
            f"{collective.size}. Run as many, or pass `rank=`: each rank then repeats what that rank did."
        )
    return entry


def _batches(entry: Mapping[str, Any], runtime: Runtime) -> Iterator[Any]:
    """The batches of a file, on the device; the generators are restored before each."""
    for each in entry["batches"]:
        restore_generators(runtime, each["generators"])
        yield move(each["batch"], runtime.device)


def _write(folder: Storage, rank: int, entry: dict[str, Any]) -> str:
    """Write the file of a rank; returns the error, if any."""
    buffer = io.BytesIO()
    try:
        torch.save(entry, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
        folder.commit(_name(rank), buffer.getvalue())
    except Exception as error:  # any error: it must be reported to the other ranks
        return f"{type(error).__name__}: {error}"
    return ""


def _plain(batch: Any) -> Any:
    """The batch on the CPU. Mappings of other classes, such as those of tokenizers, become dicts."""
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_plain(value) for value in batch)
    return batch.detach().to(_CPU) if isinstance(batch, Tensor) else batch


def _name(rank: int) -> str:
    return f"rank-{rank}.pt"
