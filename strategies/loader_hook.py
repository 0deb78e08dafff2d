"""The hook of a strategy for data loaders: one loader over the ranks of a runtime, with the messages that it needs.

Imported when it is first called, with all of `fabric.strategies.data`: a program without data loaders does not pay for
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from fabric.strategies.collectives.call_check import all_equal
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.content import Ranks
from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.loaders import process_dataloader
from fabric.strategies.data.share import Use
from fabric.strategies.data.uneven import Votes
from fabric.strategies.runtime import Runtime


def share_loader(runtime: Runtime, loader: Iterable[Any], use: Use, *, distribute: bool, move: bool) -> DeviceLoader:
    """The implementation of `Strategy.process_dataloader`."""
    collective = runtime.collective
    if distribute:
        runtime.apart.agree(runtime.share, collective.size, collective.start_add_numbers)
    return process_dataloader(
        loader,
        use,
        share=runtime.share,
        device=runtime.device,
        distribute=distribute,
        move=move,
        launcher=runtime.world.launcher,
        ranks=Ranks(
            size=collective.size,
            broadcast=collective.broadcast_object,
            gather=collective.all_gather_object,
            same=partial(all_equal, collective),
            votes=partial(votes_over, collective),
        ),
        uneven=runtime.uneven,
        in_step=runtime.layout.forward_communicates,
        progress=runtime.loader_numbers,
        report=runtime.report,
        carry=runtime.carry,
        draw_apart=runtime.draw_apart,
    )


def votes_over(collective: Collective) -> Votes:
    """The `Votes` of the ranks of a collective, over a new process group. Ranks: all call it."""
    apart = collective.split(list(range(collective.size)))
    assert apart is not None

    def gather(numbers: list[int]) -> list[list[int]]:
        gathered: list[list[int]] = apart.all_gather(torch.tensor(numbers, device="cpu")).tolist()
        return gathered

    return Votes(size=collective.size, start=apart.start_add_numbers, gather=gather)
