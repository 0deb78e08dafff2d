"""The options of pipeline parallelism: number of stages, where the model is split, and the schedule.

Each rank of the axis "pipeline" holds one or several stages of the model, and a batch passes through them in
micro-batches (Huang et al., GPipe, NeurIPS 2019; Narayanan et al., SC 2021). `torch.distributed.pipelining` runs the
schedule. The options are checked here, when they are constructed, without calling torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from torch import Tensor, nn

Split: TypeAlias = Callable[[nn.Module, int, int], nn.Module]
"""`split(model, stage, num_stages)` removes all submodules from `model` that are not in `stage`, and returns it."""


OF_ONE_STAGE = ("GPipe", "1F1B")
"""Schedules of one stage on each rank."""
OF_SEVERAL_STAGES = ("Interleaved1F1B", "LoopedBFS")
"""Schedules of two or more."""


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

    Schedules: GPipe; 1F1B (Narayanan et al., SC 2019); Interleaved1F1B (SC 2021); LoopedBFS (Lamy-Poirier, MLSys 2023).
    Schedules that compute gradients of weights apart from gradients of inputs lose some gradients in torch 2.13.
    """

    degree: int
    """Number of ranks along the axis."""
    schedule: str = "1F1B"
    """The order in which stages process micro-batches, by torch's name of it."""
    num_microbatches: int
    """Into how many equal micro-batches a rank's batch is split for training. More: less idle time, smaller matmuls."""
    split: Split
    """A function `(model, stage, num_stages) -> model` that deletes the submodules of other stages, or sets them to
    None, and keeps names: of an `nn.Sequential`, `model[:2] if stage == 0 else model[2:]`. It is called for every
    stage, on copies that share the tensors."""
    loss_fn: Callable[[Any, Tensor], Tensor]
    """`(outputs, target) -> loss`, a scalar tensor; it has no parameters."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """How the losses of micro-batches are combined: as `loss_fn` combines those of samples."""
    stages_per_rank: int | None = None
    """None: the minimum of the schedule, 1 or 2."""

    def __post_init__(self) -> None:
        schedules = (*OF_ONE_STAGE, *OF_SEVERAL_STAGES)
        if self.schedule not in schedules:
            raise ValueError(
                f"`schedule={self.schedule!r}` is not a schedule. Write one of {', '.join(map(repr, schedules))}."
            )
        for name in ("degree", "num_microbatches", "stages_per_rank"):
            number = getattr(self, name)
            if not (number is None and name == "stages_per_rank") and (type(number) is not int or number < 1):
                raise ValueError(f"`{name}={number!r}`: write a whole number from 1 on.")
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f"`loss_reduction={self.loss_reduction!r}`: write 'mean' or 'sum', as `loss_fn` reduces.")
        is_one = self.schedule in OF_ONE_STAGE
        if self.degree == 1 and not is_one:  # torch 2.13 then runs backwards in evaluation
            raise ValueError(f"`schedule={self.schedule!r}` needs two ranks or more. Write '1F1B' for `degree=1`.")
        if self.stages_per_rank is not None and is_one != (self.stages_per_rank == 1):
            raise ValueError(
                f"`stages_per_rank={self.stages_per_rank}` with `schedule={self.schedule!r}`, which needs "
                f"{'1' if is_one else '2 or more'} on each rank. Write that, or leave it out."
            )
        if not callable(self.split):
            raise TypeError(f"`split={self.split!r}` is no function. Pass one, `split(model, stage, num_stages)`.")
        if isinstance(self.loss_fn, nn.Module) and any(True for _ in self.loss_fn.parameters()):
            raise TypeError(
                f"`loss_fn` is a `{type(self.loss_fn).__name__}` with parameters, which would not be trained. Put "
                "them into the last stage of the model."
            )

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return self.degree * (self.stages_per_rank or (1 if self.schedule in OF_ONE_STAGE else 2))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank of the axis, in ascending order. The last rank holds the last stage."""
        return tuple(range(rank, self.num_stages, self.degree))
