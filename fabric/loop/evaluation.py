"""Gather the values of an evaluation from all ranks: each sample once, in the order in which one process reads them.

They are gathered once, after the loop: ranks may have different numbers of batches, or none, and none waits for
another in the loop. The prepared loader knows which batches were repeated to give ranks equal numbers, and which were
read by several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fabric.strategies.collectives import nested
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.data.device_loader import DeviceLoader, loader_name
from fabric.strategies.data.share import Share
from fabric.strategies.tensors.packing import check_dense
from fabric.strategies.tensors.paths import map_tensors

T = TypeVar("T")


@torch.no_grad()
def gather_for_metrics(
    collective: Collective, share: Share, values: Sequence[T], loader: Any, pad_value: float | None
) -> T:
    """The implementation of `Fabric.gather_for_metrics`. Ranks: all call it.

    Cost: the shapes of all batches are gathered as objects; then the values, padded to the rank with the most.
    """
    fault: Exception | None = None
    batches: list[list[Tensor]] = []
    nest: Any = None
    try:
        batches, nest = _read(values, loader, padded=pad_value is not None)
    except (TypeError, ValueError, RuntimeError) as error:
        fault = error
    shapes = [[tuple(tensor.shape) for tensor in batch] for batch in batches]
    spec = _spec_of_all(nest, pad_value) if batches else None
    of_ranks = collective.all_gather_object(("" if fault is None else str(fault), share.index, spec, shapes))
    if fault is not None:
        raise fault
    for rank, (words, _, _, _) in enumerate(of_ranks):
        if words:
            raise CollectiveError(f"`gather_for_metrics` on rank {rank}: {words}", rank=collective.rank)
    specs = {of_rank: rank for rank, (_, _, of_rank, _) in reversed([*enumerate(of_ranks)]) if of_rank is not None}
    if not specs:
        raise ValueError(f"`gather_for_metrics` of a `{loader_name(loader)}` that has yielded no batch on any rank.")
    if len(specs) > 1:
        found = "\n".join(f"rank {rank}: {each}" for each, rank in specs.items())
        raise CollectiveError(f"`gather_for_metrics` got different values:\n{found}\n{_PAD}", rank=collective.rank)
    if any(of_rank is None for _, _, of_rank, _ in of_ranks):
        nest = collective.broadcast_object(nest, src=next(iter(specs.values())))
    shares = [index for _, index, _, _ in of_ranks]
    sources = [shares.index(index) for index in sorted(set(shares))]
    return _put_together(collective, batches, nest, [of_rank[3] for of_rank in of_ranks], sources, pad_value or 0)  # type: ignore[no-any-return]


def _read(values: Sequence[Any], loader: Any, *, padded: bool) -> tuple[list[list[Tensor]], Any]:
    """This rank's values, without those of repeated batches: the tensors of each batch, in the order of their paths,
    and the values of one batch in their containers, with zero rows."""
    if not isinstance(loader, DeviceLoader):
        raise TypeError(
            f"`gather_for_metrics(values, loader)` was given a `{type(loader).__name__}` as loader. Pass what "
            "`fabric.setup_dataloaders` returned, and what the loop has iterated."
        )
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"`gather_for_metrics(values, loader)` was given a `{type(values).__name__}` as values. Append those of "
            "each batch to a list, `values.append((predictions, targets))`, and pass the list after the loop."
        )
    iteration, name = loader.iteration, loader_name(loader)
    if not iteration.is_complete:
        raise RuntimeError(
            f"`gather_for_metrics` of a `{name}` whose iteration has not ended: the loop over it has had "
            f"{iteration.num_batches} batches, and goes on or was left by `break`. Call it once, after the loop. For "
            "values of some batches, use `fabric.all_gather(fabric.pad_across_ranks(values))`."
        )
    if len(values) != iteration.num_batches:
        raise ValueError(
            f"`gather_for_metrics` was given the values of {len(values)} batches, and the last iteration of this "
            f"`{name}` gave {iteration.num_batches}. Begin each iteration with an empty list, append once for each "
            "batch, and pass the loader that the batches came from."
        )
    batches: list[list[Tensor]] = []
    paths: list[list[str]] = []
    for value in values[: iteration.num_own]:
        leaves: dict[str, Tensor] = {}
        map_tensors(leaves.setdefault, value, "values[i]")
        for tensor in leaves.values():
            check_dense(tensor)
        paths.append(list(leaves))
        batches.append([tensor.detach() for tensor in leaves.values()])
        if paths[-1] != paths[0]:
            raise ValueError(
                f"`gather_for_metrics`: the values of batch {len(paths) - 1} are {paths[-1]}, and those of batch 0 are "
                f"{paths[0]}. Give all batches the same nest."
            )
        _check_shapes(paths[0], batches[0], batches[-1], len(batches) - 1, padded=padded)
    nest = map_tensors(lambda path, tensor: tensor[:0] if tensor.ndim else tensor, values[0]) if batches else None
    return batches, nest


def _check_shapes(paths: list[str], first: list[Tensor], other: list[Tensor], number: int, *, padded: bool) -> None:
    for path, one, two in zip(paths, first, other, strict=True):
        alike = one.ndim == two.ndim and (padded or one.shape[1:] == two.shape[1:])
        if not alike or one.dtype != two.dtype or one.device != two.device:
            raise ValueError(
                f"`gather_for_metrics`: `{path}` is {_spec(one)} in batch 0 and {_spec(two)} in batch {number}. The "
                f"first dimension may differ, the rest, dtype and device are the same. {_PAD}"
            )


def _spec_of_all(nest: Any, pad_value: float | None) -> str:
    """A description that must be equal on all ranks that have values."""
    lines = [f"pad_value={pad_value}"]

    def collect(path: str, tensor: Tensor) -> None:
        rest = ("any" if pad_value is not None else str(length) for length in tensor.shape[1:])
        shape = ", ".join(("any", *rest)) if tensor.ndim else ""
        lines.append(f"{path}: {str(tensor.dtype).removeprefix('torch.')} ({shape}) on {tensor.device.type}")

    map_tensors(collect, nest, "values[i]")
    return "; ".join(lines)


def _put_together(
    collective: Collective,
    batches: list[list[Tensor]],
    nest: Any,
    shapes: list[list[list[tuple[int, ...]]]],
    sources: list[int],
    pad_value: float,
) -> Any:
    """The values of all batches of the ranks `sources`, step by step. Ranks: all call it.

    `shapes`: of each tensor of each batch of each rank.
    """
    places: list[tuple[Tensor, list[list[int]]]] = []
    """This rank's rows of each tensor, and how many each rank has of it in each step."""

    def join(path: str, like: Tensor) -> None:
        place = len(places)
        rows_of = [[each[place][0] if each[place] else 1 for each in of_rank] for of_rank in shapes]
        rests = [each[place][1:] for of_rank in shapes for each in of_rank]
        joined = like.new_full((max(map(sum, rows_of)), *map(max, zip(*rests, strict=True))), pad_value)
        start = 0
        for batch in batches:
            rows = batch[place] if batch[place].ndim else batch[place][None]
            joined[(slice(start, start + len(rows)), *map(slice, rows.shape[1:]))] = rows
            start += len(rows)
        places.append((joined, rows_of))

    map_tensors(join, nest)
    gathered = iter(nested.all_gather(collective, [joined for joined, _ in places]))
    numbers = iter([rows_of for _, rows_of in places])

    def result(path: str, like: Tensor) -> Tensor:
        of_ranks, rows_of = next(gathered), next(numbers)
        pieces = {rank: of_ranks[rank][: sum(rows_of[rank])].split(rows_of[rank]) for rank in sources}
        num_steps = max(map(len, rows_of))
        return torch.cat(
            [pieces[rank][step] for step in range(num_steps) for rank in sources if step < len(pieces[rank])]
        )

    return map_tensors(result, nest)


def _spec(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


_PAD = (
    "Where samples differ in length, pass `pad_value=` to fill them up to the longest, or leave the padding out "
    "before: `values.append(losses[mask])`."
)
