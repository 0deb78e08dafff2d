"""Gather the values of an evaluation from all ranks: each sample once, in the order in which one process reads them.

Values are gathered once, after the loop: ranks may have different numbers of batches, or none, and no rank waits for
another within the loop. The prepared loader knows which batches were repeated to give ranks equal numbers, and which
were read by several ranks.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from fabric.strategies.collectives import nested
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.data.device_loader import DeviceLoader, loader_name
from fabric.strategies.data.partition import Share
from fabric.strategies.tensors.nests import map_by_path
from fabric.strategies.tensors.packing import check_dense

T = TypeVar("T")


@torch.no_grad()
def gather_for_metrics(collective: Collective, share: Share, values: Sequence[T], loader: Any) -> T:
    """The implementation of `Fabric.gather_for_metrics`. Ranks: all call it.

    Cost: the lengths of all batches are gathered as objects; then the values, padded to the rank with the most.
    """
    _check_values(values, loader)
    own = values[: loader.iteration.num_own]
    batches, spec = _read(own)
    nest: Any = map_by_path(lambda path, tensor: (tensor if tensor.ndim else tensor[None])[:0], own[0]) if own else None
    num_rows = [list(map(len, batch)) for batch in batches]
    of_ranks = collective.all_gather_object((share.index, spec, num_rows))
    specs = {of_rank: rank for rank, (_, of_rank, _) in reversed([*enumerate(of_ranks)]) if of_rank is not None}
    if not specs:
        raise ValueError(f"`gather_for_metrics` of a `{loader_name(loader)}` that has yielded no batch on any rank.")
    if len(specs) > 1:
        found = "\n".join(f"rank {rank}: {each}" for each, rank in specs.items())
        raise CollectiveError(f"`gather_for_metrics` got different values:\n{found}\n{_PAD}", rank=collective.rank)
    if any(of_rank is None for _, of_rank, _ in of_ranks):
        nest = collective.broadcast_object(nest, src=next(iter(specs.values())))
    shares = [index for index, _, _ in of_ranks]
    sources = [shares.index(index) for index in sorted(set(shares))]
    return _put_together(collective, batches, nest, [of_rank[2] for of_rank in of_ranks], sources)  # type: ignore[no-any-return]


def _check_values(values: Any, loader: Any) -> None:
    """Raise unless these are a value for each batch of the loader's last iteration, which has ended."""
    if not isinstance(loader, DeviceLoader):
        raise TypeError(
            f"`gather_for_metrics(values, loader)` was given a `{type(loader).__name__}` as loader. Pass what "
            "`fabric.setup_dataloaders` returned, and what the loop has iterated."
        )
    iteration, name = loader.iteration, loader_name(loader)
    if not iteration.is_complete:
        raise RuntimeError(
            f"`gather_for_metrics` of a `{name}` whose iteration has not ended: the loop over it has had "
            f"{iteration.num_batches} batches, and goes on or was left by `break`. Call it once, after the loop. For "
            "values of some batches, use `fabric.all_gather(values)`."
        )
    if len(values) != iteration.num_batches:
        raise ValueError(
            f"`gather_for_metrics` was given the values of {len(values)} batches, and the last iteration of this "
            f"`{name}` gave {iteration.num_batches}. Begin each iteration with an empty list, append once for each "
            "batch, and pass the loader that the batches came from."
        )


def _read(values: Sequence[Any]) -> tuple[list[list[Tensor]], str | None]:
    """The tensors of each batch, in the order of their paths, and what must be equal in all batches of all ranks."""
    batches: list[list[Tensor]] = []
    specs: list[str] = []
    for value in values:
        leaves: dict[str, Tensor] = {}
        map_by_path(leaves.setdefault, value, "values[i]")
        batches.append([(leaf if leaf.ndim else leaf[None]).detach() for leaf in leaves.values()])
        specs.append("; ".join(f"{path}: {_spec(tensor)}" for path, tensor in leaves.items()))
        if specs[-1] != specs[0]:
            raise ValueError(
                f"`gather_for_metrics`: the values of batch {len(specs) - 1} are {specs[-1]}, and those of batch 0 "
                f"{specs[0]}. Give all batches the same nest. {_PAD}"
            )
    return batches, specs[0] if specs else None


def _spec(tensor: Tensor) -> str:
    check_dense(tensor)
    lengths = ["any", *map(str, tensor.shape[1:])] if tensor.ndim else []
    return f"{str(tensor.dtype).removeprefix('torch.')} ({', '.join(lengths)}) on {tensor.device.type}"


def _put_together(
    collective: Collective, batches: list[list[Tensor]], nest: Any, num_rows: list[list[list[int]]], sources: list[int]
) -> Any:
    """The values of all batches of the ranks `sources`, step by step. Ranks: all call it.

    `num_rows`: of each tensor of each batch of each rank.
    """
    likes: list[Tensor] = []
    map_by_path(lambda path, like: likes.append(like), nest)
    rows = [[[batch[place] for batch in of_rank] for of_rank in num_rows] for place in range(len(likes))]
    """For each tensor: how many rows each rank has of it in each step."""
    padded = [like.new_zeros((max(map(sum, rows[place])), *like.shape[1:])) for place, like in enumerate(likes)]
    for own, *parts in zip(padded, *batches, strict=True):
        torch.cat([own[:0], *parts], out=own[: sum(map(len, parts))])
    results = iter(
        _in_order([of_ranks[rank][: sum(of_rank[rank])].split(of_rank[rank]) for rank in sources])
        for of_ranks, of_rank in zip(nested.all_gather(collective, padded), rows, strict=True)
    )
    return map_by_path(lambda path, like: next(results), nest)


def _in_order(pieces: list[tuple[Tensor, ...]]) -> Tensor:
    """The pieces of all ranks, step by step."""
    return torch.cat([each for step in zip_longest(*pieces) for each in step if each is not None])


_PAD = (
    "Where samples differ in length, pad them to one length before, or leave the padding out: "
    "`values.append(losses[mask])`."
)
