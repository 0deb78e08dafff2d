"""All shares of one loader in one process: what each rank would read, without the cost of processes.

The ranks are threads that take turns: one runs until its next collective, so that one rank at a time uses the global
random generators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fabric.strategies.data.context import LoaderContext, Ranks
from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.loaders import process_dataloader
from fabric.strategies.data.loop_progress import LoopProgress
from fabric.strategies.data.partition import Share, Use


def ranks_by(
    gather: Callable[[Any], list[Any]], count: int, lead: Callable[[str, Any], Any] = lambda name, obj: obj
) -> Ranks:
    """The `Ranks` over a function that all-gathers objects."""
    return Ranks(
        size=count,
        broadcast=lambda obj: gather(obj)[0],
        gather=gather,
        same=lambda words: len(set(gather(words))) == 1,
        lead=lead,
    )


def share_out(
    make: Callable[[int], Iterable[Any]] | list[Any],
    count: int,
    use: Use = "train",
    *,
    distribute: bool = True,
    reported: list[str] | None = None,
    shares: list[Share] | None = None,
    numbers: list[LoopProgress] | None = None,
) -> list[DeviceLoader]:
    """The results of `process_dataloader` on `count` ranks for `make(rank)` or `make[rank]`.

    `reported` gets the warnings of rank 0; `shares` are given where ranks have one in common,
    `numbers` where they set up several loaders.
    """
    turn, votes, met = threading.Lock(), [None] * count, threading.Barrier(count)
    results: list[Any] = [None] * count
    led: dict[str, Any] = {}

    def rank(index: int) -> None:
        def agree(obj: Any) -> list[Any]:
            votes[index] = obj
            turn.release()
            met.wait(60)
            seen = list(votes)
            met.wait(60)
            turn.acquire()
            return seen

        with turn:
            try:
                context = LoaderContext(
                    share=shares[index] if shares else Share(index=index, count=count),
                    ranks=ranks_by(agree, count, led.setdefault if index == 0 else lambda name, obj: led[name]),
                    device=torch.device("cpu"),
                    launcher="inline",
                    progress=numbers[index] if numbers else LoopProgress(),
                    report=reported.append if reported is not None and index == 0 else lambda sentence: None,
                    use=use,
                )
                loader = make(index) if callable(make) else make[index]
                results[index] = process_dataloader(loader, context, distribute=distribute)
            except Exception as error:
                results[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def read(loaders: list[DeviceLoader]) -> list[list[Any]]:
    """Each share's batches of one epoch, as lists of numbers."""
    return [[batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader] for loader in loaders]


def in_order(shares: list[list[list[int]]]) -> list[int]:
    """The samples of all ranks, step by step, in rank order within a step."""
    return [sample for step in zip(*shares, strict=True) for batch in step for sample in batch]
