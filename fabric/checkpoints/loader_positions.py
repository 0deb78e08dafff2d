"""The positions of data loaders in a checkpoint: saved for loaders that have a state, left out for others.

`LoaderStates` is for the loaders that the user's state names, `LoaderPositions` for all other loaders of the run.

If the ranks split one order of samples, rank 0's state is saved for all. If each rank reads data of its own, the
checkpoint has the state of every rank: each writes the tensors of its own, and reads only them.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor
from torch.utils.data import DataLoader

from fabric.strategies.checkpoint.state import SKIPPED, LoaderAccess, is_stateful
from fabric.strategies.checkpoint.tensors import in_memory, of_all_ranks
from fabric.strategies.checkpoint.values import encode
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.device_loader import OTHER_THREAD, DeviceLoader, loader_name
from fabric.strategies.runtime import Runtime

OF_RANKS = "loader of each rank"
"""The key under which the states of all ranks are saved."""


@final
class LoaderStates(LoaderAccess):
    """How one fabric saves the loaders that the state names."""

    def __init__(self, collective: Collective, report_once: Callable[[str], None]) -> None:
        self._collective, self._report_once = collective, report_once

    def is_loader(self, obj: object) -> bool:
        return isinstance(obj, (DataLoader, DeviceLoader))

    def read(self, name: str, loader: Any) -> Any:
        if not is_stateful(loader):
            self._leave_out(name, loader)
            return SKIPPED
        state = loader.state_dict()
        return {OF_RANKS: of_all_ranks(self._collective, state)} if _reads_own_part(loader) else state

    def write(self, name: str, loader: Any, content: Any) -> None:
        if content is None or not is_stateful(loader):
            self._leave_out(name, loader)
            return
        states = content.get(OF_RANKS) if isinstance(content, dict) else None
        own, num_saved = _reads_own_part(loader), None if states is None else len(states)
        if num_saved != (self._collective.size if own else None):
            saved = "one position for all ranks" if states is None else f"the positions of {num_saved} ranks"
            raise ValueError(
                f"`state[{name!r}]` has {saved} in the checkpoint, and here {self._collective.size} ranks read "
                f"{'each data of its own' if own else 'one order'}. Load it with as many ranks that read the same data "
                "in the same parts, or leave it out of the state: then the epoch starts from its beginning."
            )
        loader.load_state_dict(in_memory(content if states is None else states[self._collective.rank]))

    def _leave_out(self, name: str, loader: object) -> None:
        self._report_once(
            f"`state[{name!r}]` is a `{loader_name(loader)}`, which has no state: checkpoints leave it out, and "
            "a resumed run starts its epoch from the beginning. Save what `fabric.setup_dataloaders` returned to "
            "resume in mid-epoch, or leave it out of the state."
        )


def _reads_own_part(loader: object) -> bool:
    return isinstance(loader, DeviceLoader) and loader.reads_own_part


@final
class LoaderPositions:
    """The positions of the prepared loaders that a state does not name, in the order in which they were set up.

    They are restored only if every rank can; otherwise the loaders keep their positions, and a message says why.
    """

    def __init__(self, loaders: Sequence[DeviceLoader], runtime: Runtime, report_once: Callable[[str], None]) -> None:
        self._loaders, self._collective = loaders, runtime.collective
        self._report, self._report_once = runtime.report, report_once

    def read(self) -> list[Any]:
        """The positions on this rank. Ranks: each on its own."""
        return [self._position(number, loader) for number, loader in enumerate(self._loaders)]

    def merged(self, of_ranks: list[list[Any]]) -> list[Any]:
        """What is saved, from the positions of all ranks. Ranks: each on its own."""
        if len({len(each) for each in of_ranks}) > 1:  # Python frees loaders that are not used any more
            self._report_once("Ranks have different numbers of data loaders, so their positions are not saved.")
            return []
        pairs = zip(self._loaders, zip(*of_ranks, strict=True), strict=True)
        return [
            states[0] if not loader.reads_own_part else None if None in states else {OF_RANKS: list(states)}
            for loader, states in pairs
        ]

    def write(self, saved: list[Any]) -> None:
        """Restore what `merged` returned, with a `Stored` for each tensor. Ranks: all call it.

        Raises: ValueError: a loader has changed, and its epoch has a rest.
        """
        if not saved:
            return
        fits = len(saved) == len(self._loaders)
        of_ranks = self._collective.all_gather_object([*map(self._problem, self._loaders, saved)] if fits else None)
        if None in of_ranks:
            self._report(_OTHER_NUMBER.format(saved=len(saved), here=len(self._loaders)))
            return
        for number, (loader, state, *problems) in enumerate(zip(self._loaders, saved, *of_ranks, strict=True), start=1):
            problem = next(filter(None, problems), None)
            if problem is not None:
                self._report(f"Loader {number} of the run was not restored: {problem}")
            elif state is not None:
                own = in_memory(state[OF_RANKS][self._collective.rank] if OF_RANKS in state else state)
                loader.load_state_dict(own)
                at = own["cursor"]
                place = f"epoch {at['epoch']} after {at['samples']} samples"
                if "loader" in own or at["samples"]:
                    place = "where it was saved" if "loader" in own else place
                    self._report(_CONTINUES.format(number=number, name=loader_name(loader), place=place))

    def _position(self, number: int, loader: DeviceLoader) -> Any:
        if loader.would_start or (self._collective.rank > 0 and not loader.reads_own_part):  # rank 0's is that of all
            return None
        if loader.is_of_other_thread:
            self._report_once(
                f"Checkpoints leave out the position of loader {number + 1} of the run, a `{loader_name(loader)}`, and "
                f"a resumed run starts at the beginning of its first epoch. {OTHER_THREAD}"
            )
            return None
        state = loader.state_of_run()
        try:
            encode(state, lambda at, tensor: None, lambda value: isinstance(value, Tensor))
        except TypeError as error:
            self._report_once(
                f"The state of loader {number + 1} of the run, a `{loader_name(loader)}`, cannot be saved, and "
                f"checkpoints leave it out. {error}"
            )
            return None
        return state

    def _problem(self, loader: DeviceLoader, state: Any) -> str | None:
        """Why this rank cannot restore a position; None: it can."""
        if state is None:
            return None
        if loader.iteration.is_open:
            return "the program is iterating over it. It goes on."
        of_ranks = state.get(OF_RANKS)
        if of_ranks is not None and len(of_ranks) != self._collective.size:
            return f"the checkpoint has the positions of {len(of_ranks)} ranks, and here are {self._collective.size}."
        own = state if of_ranks is None else of_ranks[self._collective.rank]
        try:
            loader.fitting(own)
        except ValueError as error:
            if any(own.get("cursor", {}).get(name) for name in ("batches", "samples")):
                raise ValueError(f"{error} {_OR_ANEW}") from None
            return str(error)
        return None


_OTHER_NUMBER = (
    "The checkpoint has the positions of {saved} data loaders that the saved state did not name, and this run has "
    "{here}: they are unchanged, and epochs start from their beginning. Set up the same loaders, in the same order, "
    "before `fabric.load`, or name them in the state."
)
_OR_ANEW = "Or pass `resume_loaders=False` to `load`: all epochs start from their beginning."
_CONTINUES = (
    "Loader {number} of the run (`{name}`) continues {place}. To start its epoch from the beginning, pass "
    "`resume_loaders=False` to `load`."
)
