"""The positions of data loaders in a checkpoint: saved where a loader knows its own, left out where it does not.

A loader whose ranks read one order stands at the same batch on all of them, so rank 0's state is that of all. Where
each rank reads a part of its own, the checkpoint has the state of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.utils.data import DataLoader

from fabric.strategies.checkpoint.state import SKIPPED, LoaderAccess, Stateful
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.device_loader import DeviceLoader, StatefulDeviceLoader, loader_name

OF_RANKS = "loader of each rank"
"""Under which the states of all ranks are saved."""


@final
class LoaderStates(LoaderAccess):
    """How one fabric saves loaders. `said`: the names that were said to be left out."""

    def __init__(self, collective: Collective, say: Callable[[str], None], said: set[str]) -> None:
        self._collective, self._say, self._said = collective, say, said

    def is_loader(self, obj: object) -> bool:
        return isinstance(obj, (DataLoader, DeviceLoader))

    def read(self, name: str, loader: Any) -> Any:
        if not isinstance(loader, Stateful):
            self._leave_out(name, loader)
            return SKIPPED
        state = loader.state_dict()
        if not _reads_own_part(loader):
            return state
        return {OF_RANKS: self._collective.all_gather_object(state)}

    def write(self, name: str, loader: Any, content: Any) -> None:
        if content is None or not isinstance(loader, Stateful):
            self._leave_out(name, loader)
            return
        states = content.get(OF_RANKS) if isinstance(content, dict) else None
        own = _reads_own_part(loader)
        if (states is not None) != own or (states is not None and len(states) != self._collective.size):
            saved = "one position for all ranks" if states is None else f"the positions of {len(states)} ranks"
            raise ValueError(
                f"`state[{name!r}]` has {saved} in the checkpoint, and here {self._collective.size} ranks read "
                f"{'each a part of its own' if own else 'one order'}. Load it where as many ranks read the same data "
                "in the same parts, or leave it out of the state, and the epoch begins anew."
            )
        loader.load_state_dict(content if states is None else states[self._collective.rank])

    def _leave_out(self, name: str, loader: object) -> None:
        if name in self._said:
            return
        self._said.add(name)
        instead = "Save what `fabric.setup_dataloaders` returned to go on in mid-epoch"
        if isinstance(loader, DeviceLoader):
            instead = "Without `in_order=False` it goes on in mid-epoch"
        self._say(
            f"`state[{name!r}]` is a `{loader_name(loader)}`, which does not know its position: checkpoints leave it "
            f"out, and a run that is resumed begins its epoch anew. {instead}, or leave it out of the state."
        )


def _reads_own_part(loader: object) -> bool:
    return isinstance(loader, StatefulDeviceLoader) and loader.reads_own_part
