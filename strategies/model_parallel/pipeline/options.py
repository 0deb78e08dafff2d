"""The options of pipeline parallelism: number of stages, where the model is split, and the schedule.

Each rank of the axis "pipeline" holds one or several stages of the model, and a batch passes through them in
micro-batches (Huang et al., GPipe, NeurIPS 2019; Narayanan et al., SC 2021). `torch.distributed.pipelining` runs the
schedule. The options are checked here, when they are constructed, without calling torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, final

from torch import Tensor, nn

Split: TypeAlias = Callable[[nn.Module, int, int], nn.Module]
"""`split(model, stage, num_stages)` removes all submodules from `model` that are not in `stage`, and returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What a schedule requires."""

    stages_per_rank: tuple[int, int | None]
    """The minimum, which is the default, and the maximum."""
    is_v: bool = False
    """Stages are assigned to ascending ranks, then to descending ones: the first and the last are on one rank."""
    splits_backward: bool = False
    """The gradients of weights are computed separately from those of inputs."""


_ORDERS = {
    "GPipe": _Order(stages_per_rank=(1, 1)),
    "1F1B": _Order(stages_per_rank=(1, 1)),
    "Interleaved1F1B": _Order(stages_per_rank=(2, None)),
    "LoopedBFS": _Order(stages_per_rank=(2, None)),
    "InterleavedZeroBubble": _Order(stages_per_rank=(2, None), splits_backward=True),
    "ZBVZeroBubble": _Order(stages_per_rank=(2, 2), is_v=True, splits_backward=True),
    "DualPipeV": _Order(stages_per_rank=(2, 2), is_v=True, splits_backward=True),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Pipeline parallelism: one or several stages of the model on each rank of the axis "pipeline".

    In the loop the model takes the target and returns the loss: `loss = model(inputs, target)` runs the whole
    schedule, backward included; `fabric.backward(loss)` accumulates the gradients. Under `torch.no_grad()` the same
    call returns the loss, and `model(inputs)` the outputs, on every rank. So that a model also runs without a
    pipeline, its `forward(self, inputs, target=None)` returns the outputs, or, given a target,
    `loss_fn(outputs, target)`. Further positional inputs go to the first stage, keyword arguments to every stage. Each
    tensor is split into micro-batches along its first dim, which is the batch.

    Losses, gradients and weights equal those of one process if samples do not depend on each other and the loss is the
    mean (or sum) over samples. BatchNorm in training, and any other layer that changes a buffer in forward, sees
    micro-batches instead of the batch, and raises. A mean over tokens that are counted per batch (`ignore_index`)
    differs between micro-batches: use `loss_reduction="sum"`, and divide in the loop. Dropout draws from each rank's
    generator, in the order of the schedule: a run is reproduced by the same seed and options, but does not equal that
    of one process, and ranks that were seeded alike draw equal numbers.

    Schedules: GPipe; 1F1B (Narayanan et al., SC 2019); Interleaved1F1B (SC 2021); LoopedBFS (Lamy-Poirier, MLSys 2023);
    InterleavedZeroBubble and ZBVZeroBubble (Qi et al., ICLR 2024); DualPipeV (DeepSeek-AI, 2024). The last three need
    torch 2.13, and every weight unsharded, trained, used, and reached by an input that requires gradients; otherwise
    they raise.
    """

    degree: int
    """Number of ranks along the axis."""
    schedule: str = "1F1B"
    """The order in which stages process micro-batches, by torch's name of it."""
    num_microbatches: int
    """Into how many equal micro-batches a rank's batch is split for training. More: less idle time, smaller matmuls."""
    split: Split | Sequence[str]
    """Where to split. A function `(model, stage, num_stages) -> model` that deletes the submodules of other stages, or
    sets them to None, and keeps names; it is called for every stage, on copies that share the tensors. Or, for an
    `nn.Sequential`, the names of the submodules at which stages 1, 2, ... begin; "blocks.2" is submodule 2 of the
    `nn.Sequential` called blocks."""
    loss_fn: Callable[[Any, Tensor], Tensor]
    """`(outputs, target) -> loss`, a scalar tensor; it has no parameters."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """How the losses of micro-batches are combined: as `loss_fn` combines those of samples."""
    stages_per_rank: int | None = None
    """None: the minimum of the schedule, 1 or 2."""

    def __post_init__(self) -> None:
        written = str(self.schedule)
        if written not in _ORDERS:
            near = get_close_matches(written.lower(), {name.lower(): name for name in _ORDERS}, n=1, cutoff=0.3)
            did = "".join(f"Did you mean {name!r}? " for name in _ORDERS if name.lower() in near)
            raise ValueError(
                f"`schedule={self.schedule!r}` is not a schedule. {did}Write one of {', '.join(map(repr, _ORDERS))}."
            )
        for name in ("degree", "num_microbatches", "stages_per_rank"):
            number = getattr(self, name)
            if not (number is None and name == "stages_per_rank") and (type(number) is not int or number < 1):
                raise ValueError(f"`{name}={number!r}`: write a whole number from 1 on.")
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f"`loss_reduction={self.loss_reduction!r}`: write 'mean' or 'sum', as `loss_fn` reduces.")
        self._check_functions()
        self._check_stages()
        self._check_microbatches()

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return self.degree * (self.stages_per_rank or _ORDERS[self.schedule].stages_per_rank[0])

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed separately from those of inputs."""
        return _ORDERS[self.schedule].splits_backward

    @property
    def is_v(self) -> bool:
        """Whether the first and the last stage are on one rank."""
        return _ORDERS[self.schedule].is_v

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank of the axis, in ascending order."""
        if self.is_v:
            return rank, self.num_stages - 1 - rank
        return tuple(range(rank, self.num_stages, self.degree))

    @property
    def last_rank(self) -> int:
        """The rank of the axis that holds the last stage."""
        return 0 if self.is_v else self.degree - 1

    def _check_functions(self) -> None:
        if isinstance(self.split, str) or not (callable(self.split) or isinstance(self.split, Sequence)):
            raise TypeError(
                f"`split={self.split!r}`: write a function `(model, stage, num_stages) -> model`, or a list of the "
                "names of the submodules at which the stages after the first begin."
            )
        if not callable(self.loss_fn):
            raise TypeError(f"`loss_fn={self.loss_fn!r}`: write a function `(outputs, target) -> loss`.")
        if isinstance(self.loss_fn, nn.Module) and any(True for _ in self.loss_fn.parameters()):
            raise TypeError(
                f"`loss_fn` is a `{type(self.loss_fn).__name__}` with parameters, which would not be trained. Put "
                "them into the last stage of the model."
            )

    def _check_stages(self) -> None:
        fewest, most = _ORDERS[self.schedule].stages_per_rank
        written = self.stages_per_rank
        if written is not None and (written < fewest or (most is not None and written > most)):
            allowed = f"{fewest}" if fewest == most else f"{fewest} or more"
            raise ValueError(
                f"`stages_per_rank={written}` with `schedule={self.schedule!r}`, which needs {allowed} on each rank. "
                f"Write that, or leave it out."
            )
        if not callable(self.split) and len(self.split) != self.num_stages - 1:
            raise ValueError(
                f"`split={list(self.split)!r}` names {len(self.split)} submodules, but `degree={self.degree}` and "
                f"`schedule={self.schedule!r}` make {self.num_stages} stages. Name the "
                f"{self.num_stages - 1} submodules at which the stages after the first begin."
            )

    def _check_microbatches(self) -> None:
        count = self.num_microbatches
        if self.schedule in ("1F1B", "DualPipeV") and count < self.num_stages:
            raise ValueError(
                f"`num_microbatches={count}` with `schedule={self.schedule!r}` and {self.num_stages} stages: it needs "
                f"at least as many micro-batches as stages. Write {self.num_stages} or more."
            )
        rounds = max(1, count // self.degree)
        if self.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
            raise ValueError(
                f"`num_microbatches={count}` with `schedule={self.schedule!r}` and `degree={self.degree}` makes "
                f"{rounds} rounds, which do not divide it. Write {count // self.degree * self.degree}."
            )
