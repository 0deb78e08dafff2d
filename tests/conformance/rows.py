"""Which strategies the suite runs over, with how many ranks, in which precision, and through which cases.

Every word of the registry is here. Strategies that need a function get one that knows the suite's own model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from fabric import Fabric
from fabric.strategies import ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized, Strategy
from fabric.strategies.strategy_registry import make_strategy
from fabric.testing import Case, cases

NOT_ON_CPU = ("fsdp_cpu_offload", "horovod", "xla", "xla_fsdp", "single_xla")
"""What this environment refuses. Those over Horovod and XLA run in environments of their own: `tests/over_horovod`,
`tests/xla`."""

ALL = tuple(map(str, cases()))
COMPILED = tuple(name for name in ALL if name.startswith("compile"))
UNCOMPILED = tuple(name for name in ALL if name != "compile")
"""torch's compiler follows DeepSpeed into its hooks, for 10 s; once is enough."""
MOST = (
    "sgd",
    "adamw",
    "groups",
    "repeated_backward",
    "accumulate_and_clip",
    "weights",
    "tied",
    "buffers",
    "optimizer_state",
    "uneven",
)
FEW = ("sgd", "adamw", "accumulate", "repeated_backward", "accumulate_and_clip", "weights")
ON_FOUR_RANKS = ("sgd", "repeated_backward", "accumulate_and_clip", "weights")
"""What says most of these: AdamW and accumulation are in the last two as well."""
WITHIN_OTHERS = ("adamw", "accumulate", "clip_norm", "repeated_backward", "load", "evaluate")
"""What other cases do as well: `groups` steps AdamW, `accumulate_and_clip` accumulates, and clips by norm, `scalars`
runs several backwards before a step, `optimizer_state` loads weights too, `evaluate_stream` evaluates a model without
an optimizer."""
STEPPING = (*MOST, "clip_norm", "closure", "frozen", "guard", "joint_optimizer", "later_optimizers", "load") + (
    "moving_average", "not_finite", "scalars", "several_models", "several_optimizers", "unused", "zero_grad"
)  # fmt: skip
"""Cases that other kernels of optimizers may change: they see parameters, gradients or states in another way."""
ALIKE = (
    "ddp-4-64-true",
    "ddp-2-bf16-mixed",
    "ddp_find_unused_parameters_true-2-64-true",
    "manual-2-32-true",
    "manual-4-32-true",
    "fsdp-2-bf16-mixed",
    "model_parallel-2-32-true",
    "ddp_sharded-4-64-true",
    "ddp_sharded-2-bf16-mixed",
    "deepspeed_stage_1-2-32-true",
    "deepspeed_stage_2-4-32-true",
    "deepspeed_stage_3_offload-2-32-true",
)
"""Rows that are left out with such kernels, which step there what they step in another row: whole parameters, DTensors
along one axis of a mesh, or parts of parameters that lie flat."""
HALF = ("bf16-true", "16-true", "bf16-mixed", "16-mixed")

GATHERED_IN_HALF = {("fsdp", "bf16-mixed"): 5e-2, ("fsdp", "16-mixed"): 1e-2}
"""Weights travel in half precision: gradients of tied ones are added in it, and embeddings come out in it."""

ADDED_IN_HALF = {("model_parallel", "bf16-mixed"): 5e-2, ("model_parallel", "16-mixed"): 6e-3}
"""Layers that are cut along their inputs: each rank rounds its part of a sum. That made at most 1.6e-2 and 2.0e-3 (22
seeds, 44 loops each), and 2e-7 against one process that adds such parts (`tests/strategies/model_parallel`)."""


# Functions for strategies that need one. At the top level: ranks import them.


def in_shards(model: nn.Module, mesh: Any) -> None:
    """Blocks in shards, and the rest with the root."""
    from torch.distributed.fsdp import fully_shard

    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh["shard"])
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}  # which cannot be cut
    fully_shard(model, mesh=mesh["shard"], ignored_params=scalars)


def in_both(model: nn.Module, mesh: Any) -> None:
    """Two layers cut along the tensor axis, one after the other, and all of it in shards. The cut may be uneven, which
    a DTensor between the two knows, and a plain tensor does not."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    pair = {"hidden": ColwiseParallel(use_local_output=False), "out": RowwiseParallel()}
    one = {"out": ColwiseParallel(output_layouts=Replicate())}  # of a single hidden number a rank would get nothing
    for part in [*getattr(model, "blocks", ())] or [model]:
        parallelize_module(part, mesh["tensor"], pair if part.hidden.out_features > 1 else one)
    in_shards(model, mesh)


def averaged(module: nn.Module, context: ManualContext) -> Parallelized:
    """Data parallel, by the strategy's own averaging."""
    return Parallelized(module=module.to(context.device), averaged=module)


WITH_A_FUNCTION: dict[tuple[str, int], Callable[[], Strategy]] = {
    ("model_parallel", 2): partial(ModelParallelStrategy, parallelize_fn=in_shards, shard=2),
    ("model_parallel", 4): partial(ModelParallelStrategy, parallelize_fn=in_both, shard=2, tensor=2),
    ("manual", 2): partial(ManualStrategy, parallelize=averaged),
    ("manual", 4): partial(ManualStrategy, parallelize=averaged),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One launch."""

    name: str
    size: int
    precision: str
    cases: tuple[str, ...]
    make: Callable[[], Strategy]
    tolerance: float | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.size}-{self.precision}"

    @property
    def left(self) -> tuple[str, ...]:
        """The cases that `make test` leaves to `make check`."""
        if self.is_thorough or (self.name in ("ddp", "fsdp") and self.size == 2 and self.precision == "32-true"):
            return ()
        if self.size == 4:
            left = set(self.cases).difference(ON_FOUR_RANKS, ("gather_gradients",)) | {"sgd"}  # SGD in the second one
        elif self.name == "deepspeed_stage_3_offload":
            left = set(self.cases).difference(ON_FOUR_RANKS, ("optimizer_state", "rollouts"))
        elif self.name == "deepspeed_stage_1" or self.cases == FEW:
            left = set(self.cases).difference(ON_FOUR_RANKS, ("gather_gradients",))
        elif self.name in ("dp", "manual", "model_parallel", "deepspeed_stage_2"):
            left = set(self.cases).difference(MOST, ("gather_gradients",)) | {"adamw"}  # AdamW in `groups`
        elif self.name in ("ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_3"):
            left = {*COMPILED, *WITHIN_OTHERS}
        elif self.name == "ddp_find_unused_parameters_true":
            left = {"adamw", "accumulate"}
        else:  # `ddp` and `fsdp` run all of them
            left = set(COMPILED)
        return tuple(name for name in self.cases if name in left)

    def launches(self) -> list[tuple[Row, bool]]:
        """What is run in one test each, and whether `make test` leaves it to `make check`."""
        if not self.left:
            return [(self, self.is_thorough)]
        kept = tuple(name for name in self.cases if name not in self.left)
        return [(replace(self, cases=kept), False), (replace(self, cases=self.left), True)]

    @property
    def is_thorough(self) -> bool:
        """Whether `make test` leaves it to `make check`: another row of the technique says nearly the same."""
        in_half = self.precision in HALF and self.precision != "bf16-mixed" and self.name != "manual"
        return in_half or (self.name, self.size, self.precision) in THOROUGH

    def chosen(self) -> list[Case]:
        """The cases themselves."""
        return [case for case in cases() if case.name in self.cases]


def why_not(name: str) -> str | None:
    """The sentence with which this machine refuses the strategy of a name; None where it runs."""
    try:
        Fabric(accelerator="cpu", devices=1, strategy=name)
    except Exception as error:
        return str(error)
    return None


PLAN: tuple[tuple[str, int, str, tuple[str, ...]], ...] = (
    ("single_device", 1, "32-true", ALL),
    ("single_device", 1, "64-true", MOST),
    ("dp", 1, "64-true", ALL),
    ("ddp", 2, "32-true", ALL),
    ("ddp", 4, "64-true", MOST),
    ("ddp", 1, "64-true", FEW),
    ("ddp_find_unused_parameters_true", 2, "64-true", (*FEW, "unused", "buffers", "policy")),
    ("ddp_spawn", 2, "64-true", FEW),  # spawn starts each rank with an import of torch: one row says it all
    ("fsdp", 2, "32-true", ALL),
    ("fsdp", 4, "64-true", MOST),
    ("fsdp", 1, "64-true", FEW),
    ("hsdp", 4, "64-true", (*FEW, "rollouts")),
    ("model_parallel", 2, "32-true", ALL),
    ("model_parallel", 4, "64-true", (*MOST, "gather_gradients", "rollouts")),
    *(("model_parallel", 4, word, ("sgd", "accumulate_and_clip")) for word in HALF),
    ("manual", 2, "32-true", ALL),
    ("manual", 4, "32-true", FEW),
    ("manual", 2, "16-mixed", FEW),
    ("ddp_sharded", 2, "32-true", ALL),
    ("ddp_sharded", 4, "64-true", MOST),
    ("ddp_sharded", 1, "64-true", FEW),
    ("ddp_sharded_spawn", 2, "64-true", FEW),
    ("ddp_fully_sharded", 2, "32-true", ALL),
    ("ddp_fully_sharded", 4, "32-true", MOST),
    ("ddp_fully_sharded", 1, "32-true", FEW),
    ("deepspeed", 2, "32-true", FEW),
    ("deepspeed_stage_1", 2, "32-true", UNCOMPILED),
    ("deepspeed_stage_2", 2, "32-true", ALL),
    ("deepspeed_stage_2", 4, "32-true", MOST),
    ("deepspeed_stage_2", 1, "32-true", FEW),
    ("deepspeed_stage_3", 2, "32-true", UNCOMPILED),
    ("deepspeed_stage_3", 4, "32-true", MOST),
    ("deepspeed_stage_1_offload", 2, "32-true", FEW),
    ("deepspeed_stage_2_offload", 2, "32-true", MOST),
    ("deepspeed_stage_3_offload", 2, "32-true", (*MOST, "rollouts")),
    *(("single_device", 1, word, FEW) for word in HALF),
    *(("ddp", 2, word, FEW) for word in HALF),
    *(("fsdp", 2, word, (*FEW, "guard") if word == "16-mixed" else FEW) for word in HALF),
    *(("ddp_sharded", 2, word, (*FEW, "guard") if word == "16-mixed" else FEW) for word in HALF),
    *(("ddp_fully_sharded", 2, word, FEW) for word in HALF if word != "bf16-true"),
    ("deepspeed_stage_2", 2, "bf16-mixed", FEW),
    ("deepspeed_stage_3", 2, "bf16-mixed", FEW),
)
"""Each strategy runs through all cases once; variants of one class through few."""

THOROUGH = (
    ("single_device", 1, "64-true"),
    ("ddp", 1, "64-true"),
    ("fsdp", 1, "64-true"),
    ("ddp_sharded", 1, "64-true"),
    ("ddp_fully_sharded", 1, "32-true"),
    ("deepspeed_stage_2", 1, "32-true"),
    ("deepspeed_stage_3", 4, "32-true"),
    ("deepspeed", 2, "32-true"),
    ("deepspeed_stage_1_offload", 2, "32-true"),
    ("deepspeed_stage_2_offload", 2, "32-true"),
    ("deepspeed_stage_2", 2, "bf16-mixed"),
    ("ddp_sharded_spawn", 2, "64-true"),
    ("model_parallel", 4, "bf16-mixed"),
    ("ddp_spawn", 2, "64-true"),
    ("ddp_fully_sharded", 4, "32-true"),
    ("deepspeed_stage_3", 2, "bf16-mixed"),
    ("ddp_fully_sharded", 2, "bf16-mixed"),
    ("fsdp", 4, "64-true"),
)
"""One row of four ranks per technique is not among them."""


def rows() -> list[Row]:
    """Every launch of the suite but those that fork."""
    return [
        Row(
            name=name,
            size=size,
            precision=precision,
            cases=some,
            make=WITH_A_FUNCTION.get((name, size)) or partial(make_strategy, name),
            tolerance=(GATHERED_IN_HALF | ADDED_IN_HALF).get((name, precision)),
        )
        for name, size, precision, some in PLAN
    ]


def forked_rows() -> list[Row]:
    """Launches that go on from this very process, and need one that has computed nothing. The last has one rank, for
    what that computes would keep the next from forking. What a rank computes, `ddp` says in the other rows."""
    return [
        Row(name=name, size=size, precision=precision, cases=some, make=partial(make_strategy, name))
        for name, size, precision, some in (
            ("ddp_fork", 2, "64-true", ("repeated_backward", "accumulate_and_clip")),
            ("ddp_notebook", 2, "32-true", ("accumulate_and_clip",)),
            ("ddp_fork", 4, "32-true", ("accumulate_and_clip",)),
            ("ddp_fork", 1, "64-true", ("accumulate_and_clip",)),
        )
    ]
