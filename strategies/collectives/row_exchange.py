"""Rows sent to chosen ranks, and results sent back: for sharded embedding tables and mixtures of experts.

Each rank chooses a destination rank per row; the number of rows differs from pair to pair. Built on `all_to_all` with
equal splits, which every collective has, so it runs over any backend.
"""

from itertools import pairwise
from typing import Any, cast, final

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import Collective


@final
class Route:
    """The destination rank of each of this rank's N rows, and how many rows arrive here.

    `owner`: `(N,)` integers, the rank that each row goes to. N may differ between ranks, and be 0.
    Ranks: all of the collective create it, and call its methods, in the same order.
    Cost: `(W + 2,)` integers are gathered here, and read: one wait for the device. Then each exchange sends W times the
    rows of the largest pair; evenly distributed rows need little padding.
    Raises: ValueError: on all ranks, if the owner of a row is no rank.
    """

    def __init__(self, collective: Collective, owner: Tensor) -> None:
        size = collective.size
        if owner.ndim != 1 or owner.is_floating_point():
            raise ValueError(
                f"`Route(collective, owner)` with an `owner` of shape {tuple(owner.shape)} and dtype {owner.dtype}: "
                "pass one integer, a rank, for each row."
            )
        self._collective = collective
        in_order, self._order = owner.long().sort(stable=True)
        starts = torch.searchsorted(in_order, torch.arange(size + 1, device=owner.device))
        # For every rank: the start of the rows for each rank, the end of the last of these, and the number of rows.
        of_ranks = collective.all_gather(torch.cat([starts, starts.new_full((1,), len(owner))])).tolist()
        wrong = [rank for rank, (first, *_, end, num_rows) in enumerate(of_ranks) if first > 0 or end < num_rows]
        if wrong:
            whose = f"from {owner.min()} to {owner.max()}" if collective.rank in wrong else f"on rank {wrong[0]}"
            raise ValueError(
                f"`Route(collective, owner)` with owners {whose}: the collective has ranks from 0 to {size - 1}."
            )
        counts = [[end - start for start, end in pairwise(starts[:-1])] for starts in of_ranks]  # [src][dst]
        self._sent = counts[collective.rank]
        self._arrived = [of_rank[collective.rank] for of_rank in counts]
        self._fullest = max(map(max, counts))

    def send(self, rows: Tensor) -> Tensor:
        """Send each row to its owner: `(N, *S)` -> `(M, *S)`, in the order of the ranks they came from.

        Ranks: all, with the same S and dtype. Differentiable.
        """
        return self._checked_exchange(rows, self._order.numel(), "send", there=True)

    def send_back(self, rows: Tensor) -> Tensor:
        """Send back a result for each row that arrived: `(M, *S)` -> `(N, *S)`, in the order of this rank's own rows.

        Ranks: all, with the same S and dtype. Differentiable.
        """
        return self._checked_exchange(rows, sum(self._arrived), "send_back", there=False)

    def _checked_exchange(self, rows: Tensor, num_rows: int, method: str, *, there: bool) -> Tensor:
        if rows.ndim == 0 or rows.shape[0] != num_rows:
            raise ValueError(
                f"`Route.{method}` of a tensor of shape {tuple(rows.shape)}: this rank has {num_rows} rows to send. "
                f"Pass a tensor of shape ({num_rows}, ...)."
            )
        return cast(Tensor, _Exchange.apply(rows, self, there))  # type: ignore[no-untyped-call]

    def exchange(self, rows: Tensor, *, there: bool) -> Tensor:
        """`send` (`there`) and `send_back`, without gradients."""
        if self._fullest == 0:  # no rank has a row, and all ranks know this
            return rows.detach().clone()
        if there:
            return self._swap(rows[self._order], self._sent, self._arrived)
        answers = torch.empty((self._order.numel(), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        answers[self._order] = self._swap(rows, self._arrived, self._sent)
        return answers

    def _swap(self, rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
        slices = rows.new_zeros((len(sent), self._fullest, *rows.shape[1:]))
        for one, part in zip(slices, rows.split_with_sizes(sent), strict=True):
            one[: len(part)] = part
        arrived = self._collective.all_to_all(slices)
        return torch.cat([one[:count] for one, count in zip(arrived, arriving, strict=True)])


class _Exchange(torch.autograd.Function):
    """Gradients are exchanged in the opposite direction; differentiable itself."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, there: bool) -> Tensor:
        ctx.route, ctx.there = route, there
        return route.exchange(rows.detach(), there=there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(gradients[0], ctx.route, not ctx.there), None, None  # type: ignore[no-untyped-call]
