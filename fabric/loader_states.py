"""The positions of data loaders in a checkpoint: saved for loaders that have a state, left out for others.

If the ranks split one order of samples, rank 0's state is that of all. If each rank reads data of its own, the
checkpoint has the state of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.utils.data import DataLoader

from fabric.strategies.checkpoint.state import SKIPPED, LoaderAccess, Stateful
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.device_loader import DeviceLoader, StatefulDeviceLoader, loader_name

OF_RANKS = "loader of each rank"
"""The key under which the states of all ranks are saved."""


@final
class LoaderStates(LoaderAccess):
    """How one fabric saves loaders. `reported`: names whose omission was reported before."""

    def __init__(self, collective: Collective, report: Callable[[str], None], reported: set[str]) -> None:
        self._collective, self._report, self._reported = collective, report, reported

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
                f"{'each data of its own' if own else 'one order'}. Load it with as many ranks that read the same data "
                "in the same parts, or leave it out of the state: then the epoch starts from its beginning."
            )
        loader.load_state_dict(content if states is None else states[self._collective.rank])

    def _leave_out(self, name: str, loader: object) -> None:
        if name in self._reported:
            return
        self._reported.add(name)
        instead = "Save what `fabric.setup_dataloaders` returned to resume in mid-epoch"
        if isinstance(loader, DeviceLoader):
            instead = "Without `in_order=False` it resumes in mid-epoch"
        self._report(
            f"`state[{name!r}]` is a `{loader_name(loader)}`, which has no state: checkpoints leave it out, and "
            f"a resumed run starts its epoch from the beginning. {instead}, or leave it out of the state."
        )


def _reads_own_part(loader: object) -> bool:
    return isinstance(loader, StatefulDeviceLoader) and loader.reads_own_part
