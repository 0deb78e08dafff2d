"""What one fabric saves and loads: the implementations of `Fabric.save`, `load`, `load_raw` and `state_dict`.

Imported when it is first used, with all of `fabric.strategies.checkpoint`: a program that saves nothing does not pay
for it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from fabric.checkpoints.loader_positions import LoaderStates
from fabric.checkpoints.run_state import RunState, is_run
from fabric.checks.check import Moments
from fabric.launchers.rank.rank import saving as saving_rank
from fabric.loop.setup import SetUp
from fabric.strategies.checkpoint import other_formats, read_and_verify, write_and_commit
from fabric.strategies.checkpoint.direct_state_dict import HOW_TO_SAVE
from fabric.strategies.checkpoint.errors import (
    CheckpointEntryError,
    CheckpointError,
    raised_together,
    read_by_rank_zero,
)
from fabric.strategies.checkpoint.mismatches import mismatches, table
from fabric.strategies.checkpoint.state import RUN, Filter, ObjectStates, Stateful, is_stateful, named_objects
from fabric.strategies.checkpoint.storage import storage_of
from fabric.strategies.checkpoint.tensors import gathered, snapshot
from fabric.strategies.checkpoint.write_and_commit import BackgroundSaves, PendingSave
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.dtensor import local_part
from fabric.strategies.tensors.parameters import name_some, uncompiled

Path = str | os.PathLike[str]


@final
class Checkpoints:
    """The checkpoints of one fabric while it is connected."""

    def __init__(self, runtime: Runtime, set_up: SetUp, moments: Moments) -> None:
        self._runtime, self._collective = runtime, runtime.collective
        self._set_up, self._moments, self._access = set_up, moments, set_up.state_access
        self._report_once = cache(runtime.report)
        """Reports what checkpoints leave out: each message once."""
        self._loaders = LoaderStates(self._collective, self._report_once)
        self._states = ObjectStates(self._access, self._loaders)
        self._background = BackgroundSaves(runtime.collective, saving_rank)
        self.folder = next((check.checkpoint_folder for check in moments.checks if check.checkpoint_folder), None)
        """Under `fabric verify`: of all saves. `CheckpointDirectory` then removes nothing."""
        self._moved: dict[str, str] = {}

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        keep: Filter | None,
        after_commit: Callable[[], object] | None,
        *,
        blocking: bool,
    ) -> PendingSave:
        """See `Fabric.save`; `keep`: its `filter`."""
        storage, pending = storage_of(self.place(path, saves=True)), None
        with self.announced(path, blocking=blocking), saving_rank():
            self.wait()
            content = self.content(state, keep)
            if blocking:
                write_and_commit.save(self._collective, storage, content, after_commit, self._background.off_device)
            else:
                pending = self._background.start(storage, content, after_commit)
        return pending or PendingSave(storage.path)

    def place(self, path: Path, *, saves: bool = False) -> Path:
        """The path; of what is saved in `folder`, the place there."""
        if self.folder is None:
            return path
        given = os.path.abspath(path)
        if saves:
            self._moved.setdefault(given, f"{self.folder}/{len(self._moved)}")
        return self._moved.get(given, path)

    @contextmanager
    def announced(self, path: str | os.PathLike[str], *, blocking: bool = True) -> Iterator[None]:
        """Context: what checks are told of as a save."""
        for began in self._moments.saving:
            began()
        yield
        for ended in self._moments.saved:
            ended(os.fspath(path), blocking)

    def wait(self) -> None:
        """Wait for the save in the background. Any rank may call it. Raises: CheckpointError: it failed."""
        self._background.finish()

    def close(self) -> None:
        """As `wait`, and free the memory. Ranks: each on its own."""
        self._background.close()

    def load(
        self, path: Path, state: MutableMapping[str, Any] | None, *, strict: bool, resume_loaders: bool
    ) -> dict[str, Any]:
        """See `Fabric.load`."""
        if state is not None:
            _check_named("load", state)
        found = {} if state is None else state
        content = self._read(path)
        run = content.pop(RUN, None)
        with self._loading("load", path, found, content, strict=strict):
            rest = self._states.restore(found, content, strict=strict)
            if is_run(dict(found)):
                self._run_state(found).write(run, resume_loaders=resume_loaders)
        return rest

    def load_raw(self, path: Path, obj: Stateful, *, strict: bool) -> None:
        """See `Fabric.load_raw`."""
        content = self._read(path)
        if isinstance(obj, nn.Module):
            content = other_formats.with_tied(uncompiled(obj), content)
        name = type(obj).__name__
        with self._loading("load_raw", path, {name: obj}, {name: content}, strict=strict):
            self._states.load_into(obj, content, strict=strict)

    def state_dict(self, *objects: nn.Module | Optimizer, all_ranks: bool) -> list[dict[str, Any]]:
        """The states of a model and an optimizer, in this order."""
        with torch.inference_mode(False), torch.no_grad():  # in which DTensors cannot be gathered
            content = self._states.read({str(number): each for number, each in enumerate(objects)})
            whole = gathered(self._collective, content)
        states = [snapshot(whole[each], objects, local_part) if whole else {} for each in content]
        return self._collective.broadcast_object(states) if all_ranks else states

    def weights(self, module: nn.Module, *wanted: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Fabric.weights`; `wanted`: the fields of `Wanted`."""
        from fabric.checkpoints.weights_in_buckets import Wanted, weights

        return weights(self._runtime, module, self._access(module), Wanted(*wanted))

    def content(self, state: Mapping[str, Any], keep: Filter | None) -> dict[str, Any]:
        """The states of the objects, as each rank holds them. Ranks: all."""
        _check_named("save", state)
        content = self._states.read(state, keep)
        if any(is_stateful(each) for _, each in named_objects(dict(state))):
            content[RUN] = self._run_state(state).read()
        return content

    def _read(self, path: Path) -> Any:
        """Read a checkpoint, or a file of another library. Ranks: all."""
        self.wait()
        path = self.place(path)
        storage = storage_of(path)
        if read_by_rank_zero(self._collective, storage.path, lambda: other_formats.is_foreign(path)):
            return other_formats.load(self._collective, path)
        return read_and_verify.load(self._collective, storage)

    @contextmanager
    def _loading(self, method: str, path: Path, state: Any, content: Any, *, strict: bool) -> Iterator[None]:
        """Context: raise CheckpointError on every rank if a state does not fit; after it, call `Check.loaded`."""
        rows = mismatches(dict(state), content, self._access, self._loaders)
        wrong = rows if strict else [row for row in rows if not row.is_left_out]
        with raised_together(self._collective, "read", os.fspath(path)):
            if wrong:
                hint = _NO_WEIGHTS if any(row.there == "(0,)" for row in wrong) else _OTHER_NAMES
                kind = CheckpointError
                if any(row.there == "missing" and row.entry in state for row in wrong):
                    kind, hint = CheckpointEntryError, _ENTRIES.format(name_some([*map(str, content)]))
                raise kind(f"it does not fit, and nothing was loaded.\n{table(wrong)}\n{hint}")
        if rows:
            self._runtime.report(f"`fabric.{method}(..., strict=False)` left out:\n{table(rows)}")
        # What an optimizer keeps would not be trained on if it were made within `torch.inference_mode`.
        with torch.inference_mode(False):
            yield
        for moment in self._moments.loaded:
            moment()

    def _run_state(self, state: Mapping[str, Any]) -> RunState:
        return RunState(self._runtime, self._set_up, dict(state), self._report_once)


def _check_named(method: str, state: object) -> None:
    """Raise TypeError if `state` is no mapping with names, ValueError if it uses a reserved name."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"`fabric.{method}(path, ...)` was given a `{type(state).__name__}`. Give it a name: "
            "`{'model': model}`. `load_raw` reads a file that holds the bare state of one object."
        )
    if RUN in state:
        raise ValueError(
            f"`fabric.{method}(path, {{{RUN!r}: ...}})`: this name is reserved for the run's random "
            "generators and loss scale. Write another one."
        )


_NO_WEIGHTS = (
    "A file with empty tensors was written by hand from `model.state_dict()` of a sharded model. Where it was made, "
    f"{HOW_TO_SAVE}"
)
_ENTRIES = "The checkpoint has {}: name these entries. `fabric.load_raw(path, module)` reads a file of one bare state."
_OTHER_NAMES = (
    "Where a file has the same tensors under other names, rename them before `fabric.setup`: "
    "`module.load_state_dict({name.removeprefix('module.'): tensor for name, tensor in fabric.load(path).items()})`."
)
