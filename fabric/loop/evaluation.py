"""Gather the values of an evaluation from all ranks: each sample once, in the order in which one process reads them.

They are gathered once, after the loop: ranks may have different numbers of batches, or none, and none waits for
another in the loop. The prepared loader knows which batches were repeated to give ranks equal numbers, and which were
read by several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from fabric.strategies.collectives import nested
from fabric.strategies.collectives.call_check import check_call
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

    Cost: an all-gather of three numbers, one of the shapes of all batches, and one of the values, padded to the rank
    with the most.
    """
    fault: Exception | None = None
    try:
        mine = _read(values, loader, pad_value)
    except (TypeError, ValueError, RuntimeError) as error:
        fault, mine = error, _Values([], None, pad_value)
    own = torch.tensor([fault is not None, len(mine.batches), share.index], device="cpu")
    faults, counts, shares = collective.all_gather(own).T.tolist()
    if any(faults):
        _raise_together(collective, fault)
    if not any(counts):
        raise ValueError(f"`gather_for_metrics` of a `{loader_name(loader)}` that has yielded no batch on any rank.")
    if not all(counts):
        first = next(rank for rank, count in enumerate(counts) if count)
        mine.nest = collective.broadcast_object(mine.nest, src=first)
    check_call(collective, "\n".join(["gather_for_metrics", *mine.lines()]), advice=_PAD)
    sources = [shares.index(index) for index in sorted(set(shares))]
    return mine.put_together(collective, counts, sources)  # type: ignore[no-any-return]


def _read(values: Sequence[Any], loader: Any, pad_value: float | None) -> _Values:
    """This rank's values, without those of repeated batches."""
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
        _check_shapes(paths[0], batches[0], batches[-1], len(batches) - 1, padded=pad_value is not None)
    nest = map_tensors(lambda path, tensor: tensor[:0] if tensor.ndim else tensor, values[0]) if batches else None
    return _Values(batches, nest, pad_value)


def _check_shapes(paths: list[str], first: list[Tensor], other: list[Tensor], number: int, *, padded: bool) -> None:
    for path, one, two in zip(paths, first, other, strict=True):
        alike = one.ndim == two.ndim and (padded or one.shape[1:] == two.shape[1:])
        if not alike or one.dtype != two.dtype or one.device != two.device:
            raise ValueError(
                f"`gather_for_metrics`: `{path}` is {_spec(one)} in batch 0 and {_spec(two)} in batch {number}. The "
                f"first dimension may differ, the rest, dtype and device are the same. {_PAD}"
            )


@final
@dataclass(slots=True)
class _Values:
    """The values of one rank: the tensors of each batch, in the order of their paths."""

    batches: list[list[Tensor]]
    nest: Any
    """The values of one batch in their containers, with zero rows."""
    pad_value: float | None

    def lines(self) -> list[str]:
        """A description that must be equal on all ranks."""
        lines = [f"pad_value: {self.pad_value}"]

        def collect(path: str, tensor: Tensor) -> None:
            rest = ", ".join("any" if self.pad_value is not None else str(length) for length in tensor.shape[1:])
            shape = f"(any, {rest})" if tensor.ndim > 1 else "(any)" if tensor.ndim else "()"
            lines.append(f"{path}: {str(tensor.dtype).removeprefix('torch.')} {shape} on {tensor.device.type}")

        map_tensors(collect, self.nest, "values[i]")
        return lines

    def put_together(self, collective: Collective, counts: list[int], sources: list[int]) -> Any:
        """The values of all batches of the ranks `sources`, step by step. Ranks: all call it."""
        empty: list[Tensor] = []
        map_tensors(lambda path, tensor: empty.append(_rows(tensor)[:0]), self.nest)
        batches = [list(map(_rows, batch)) for batch in self.batches]
        shapes = torch.zeros((max(counts), sum(each.ndim for each in empty)), dtype=torch.int64, device="cpu")
        for step, batch in enumerate(batches):
            shapes[step] = torch.tensor([length for each in batch for length in each.shape])
        of_ranks = collective.all_gather(shapes)
        lengths = []
        """Number of rows of each tensor, `(ranks, steps)`."""
        mine = []
        for place, (each, of_each) in enumerate(
            zip(empty, of_ranks.split_with_sizes([t.ndim for t in empty], dim=2), strict=True)
        ):
            lengths.append(of_each[:, :, 0])
            shape = [int(lengths[-1].sum(dim=1).max()), *of_each[:, :, 1:].amax(dim=(0, 1)).tolist()]
            mine.append(self._joined([batch[place] for batch in batches], shape, each))
        gathered = iter(zip(nested.all_gather(collective, mine), lengths, strict=True))

        def result(path: str, tensor: Tensor) -> Tensor:
            rows, numbers = next(gathered)
            pieces = {
                rank: rows[rank][: int(numbers[rank].sum())].split_with_sizes(numbers[rank].tolist())
                for rank in sources
            }
            return torch.cat(
                [pieces[rank][step] for step in range(max(counts)) for rank in sources if step < counts[rank]]
            )

        return map_tensors(result, self.nest)

    def _joined(self, batches: list[Tensor], shape: list[int], like: Tensor) -> Tensor:
        """The rows of all batches, of `shape`."""
        joined = like.new_full(shape, self.pad_value or 0)
        start = 0
        for batch in batches:
            joined[(slice(start, start + len(batch)), *map(slice, batch.shape[1:]))] = batch
            start += len(batch)
        return joined


def _raise_together(collective: Collective, fault: Exception | None) -> None:
    """Raise the error of this rank, and on other ranks the error that it failed. Ranks: all call it."""
    words = collective.all_gather_object("" if fault is None else str(fault))
    if fault is not None:
        raise fault
    rank = next(rank for rank, own in enumerate(words) if own)
    raise CollectiveError(f"`gather_for_metrics` on rank {rank}: {words[rank]}", rank=collective.rank)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor[None]


def _spec(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


_PAD = (
    "Where samples differ in length, pass `pad_value=` to fill them up to the longest, or leave the padding out "
    "before: `values.append(losses[mask])`."
)
