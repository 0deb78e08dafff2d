"""The hook of a strategy for data loaders: one loader over the ranks of a runtime, with the messages that it needs.

Imported when it is first called, with all of `fabric.strategies.data`: a program without data loaders does not pay for
it.
"""

import pickle
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.collectives.fabric_calls_check import all_equal
from fabric.strategies.data.context import LoaderContext, Ranks
from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.loaders import process_dataloader
from fabric.strategies.data.partition import Use
from fabric.strategies.data.uneven import Votes
from fabric.strategies.runtime import Runtime


def share_loader(runtime: Runtime, loader: Iterable[Any], use: Use, *, distribute: bool, move: bool) -> DeviceLoader:
    """The implementation of `Strategy.process_dataloader`."""
    collective = runtime.collective
    if distribute:
        runtime.divergence.compare(runtime.share, collective.size, collective.start_add_numbers)
    context = LoaderContext(
        share=runtime.share,
        ranks=Ranks(
            size=collective.size,
            broadcast=collective.broadcast_object,
            gather=collective.all_gather_object,
            same=partial(all_equal, collective),
            lead=partial(lead, collective),
            votes=partial(votes_over, collective),
        ),
        device=runtime.device,
        launcher=runtime.world.launcher,
        progress=runtime.loop_progress,
        report=runtime.report,
        use=use,
        uneven=runtime.uneven,
        forward_communicates=runtime.layout.forward_communicates,
        carry=runtime.carry,
        before_iterating=runtime.diverge_generators,
    )
    return process_dataloader(loader, context, distribute=distribute, move=move)


def lead(collective: Collective, name: str, obj: Any) -> Any:
    """The object of rank 0. Ranks: rank 0 does not wait for the others, and no other one returns before it.

    Raises: CollectiveError: rank 0 has not come here within the timeout of the ranks' store.
    """
    store, key = collective.store(), f"loaders/{name}"
    if store is None:
        return obj
    if collective.rank == 0:
        store.set(key, pickle.dumps(obj).hex())
        return obj
    patience: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
    deadline, pause = time.monotonic() + patience, 0.001
    while not store.check([key]):  # `wait` would lock the connection, which other threads use
        if time.monotonic() > deadline:
            raise CollectiveError(_NOT_BEGUN.format(seconds=patience), rank=collective.rank)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    led = pickle.loads(bytes.fromhex(store.get(key).decode()))
    if store.add(f"{key}/read", 1) == collective.size - 1:
        store.delete_key(key), store.delete_key(f"{key}/read")
    return led


_NOT_BEGUN = (
    "This rank has waited {seconds:g} s for rank 0 to begin the same epoch of a loader that shuffles, whose order is "
    "rank 0's. Let every rank iterate the loader; rank 0 may also wait in a call that it makes alone, such as a save. "
    "For a loop on some ranks only, pass `use='validate'`, `'test'` or `'predict'` to `setup_dataloaders`."
)


def votes_over(collective: Collective) -> Votes:
    """The `Votes` of the ranks of a collective, over a new process group. Ranks: all call it."""
    apart = collective.split(list(range(collective.size)))
    assert apart is not None

    def gather(numbers: list[int]) -> list[list[int]]:
        gathered: list[list[int]] = apart.all_gather(torch.tensor(numbers, device="cpu")).tolist()
        return gathered

    return Votes(size=collective.size, start=apart.start_add_numbers, gather=gather)
