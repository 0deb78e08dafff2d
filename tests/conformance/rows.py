"""Which strategies the suite runs over, with how many ranks, in which precision, and through which cases.

Every word of the registry is here. Strategies that need a function get one that knows the suite's own model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fabric import Fabric
from fabric.strategies import ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized, Strategy
from fabric.strategies.registry import make_strategy
from fabric.testing import Case, cases

NOT_ON_CPU = ("fsdp_cpu_offload", "horovod", "xla", "xla_fsdp", "single_xla")
"""What this environment refuses. Those over Horovod and XLA run in environments of their own: `tests/over_horovod`,
`tests/xla`."""

ALL = tuple(map(str, cases()))
UNCOMPILED = tuple(name for name in ALL if name != "compile")
"""torch's compiler follows DeepSpeed into its hooks, for 10 s; once is enough."""
MOST = ("sgd", "adamw", "groups", "accumulate_and_clip", "tied", "buffers", "optimizer_state", "uneven")
FEW = ("sgd", "adamw", "accumulate", "accumulate_and_clip")
HALF = ("bf16-true", "16-true", "bf16-mixed", "16-mixed")

GATHERED_IN_HALF = {"bf16-mixed": 5e-2, "16-mixed": 1e-2, "16-true": 0.1}
"""Weights travel in half precision: gradients of tied ones are added in it, and embeddings come out in it. 16-true: the
shards' gradients are rounded in another order, and AdamW, whose squares underflow, makes of it as much as the plain
loop in float16 is away from float32 (0.1, 35 seeds)."""


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


def rows() -> list[Row]:
    """Every launch of the suite but those that fork. Each strategy runs through all cases once."""
    planned: list[Row] = []
    for name in ("single_device", "dp"):
        planned += [_row(name, 1, "32-true", ALL), _row(name, 1, "64-true", MOST)]
    for name in ("ddp", "fsdp", "ddp_sharded"):
        planned += [_row(name, 2, "32-true", ALL), _row(name, 4, "64-true", MOST), _row(name, 1, "64-true", MOST)]
    planned += [_row("ddp_find_unused_parameters_true", 2, "32-true", ALL), _row("hsdp", 4, "64-true", MOST)]
    planned += [_row("ddp_fully_sharded", size, "32-true", some) for size, some in ((2, ALL), (4, MOST), (1, FEW))]
    for name, some in (
        ("deepspeed_stage_1", UNCOMPILED),
        ("deepspeed_stage_2", ALL),
        ("deepspeed_stage_3", UNCOMPILED),
    ):
        planned += [_row(name, 2, "32-true", some), _row(name, 4, "32-true", MOST)]
    planned += [_row("deepspeed_stage_2", 1, "32-true", FEW)]
    planned += [_row("deepspeed", 2, "32-true", FEW)]
    planned += [_row(f"deepspeed_stage_{stage}_offload", 2, "32-true", MOST) for stage in (1, 2, 3)]
    # Spawn starts each rank with an import of torch: there one row says it all.
    planned += [_row(name, 2, "64-true", FEW) for name in ("ddp_spawn", "ddp_sharded_spawn")]
    planned += [
        _made("model_parallel", 2, "32-true", ALL, lambda: ModelParallelStrategy(parallelize_fn=in_shards, shard=2)),
        _made(
            "model_parallel",
            4,
            "64-true",
            ALL,
            lambda: ModelParallelStrategy(parallelize_fn=in_both, shard=2, tensor=2),
        ),
        _made("manual", 2, "32-true", ALL, lambda: ManualStrategy(parallelize=averaged)),
    ]
    # In half precision
    for name, size in (("single_device", 1), ("ddp", 2), ("ddp_sharded", 2)):
        planned += [_row(name, size, word, FEW) for word in HALF]
    planned += [_row("fsdp", 2, word, FEW, GATHERED_IN_HALF.get(word)) for word in HALF]
    planned += [_row(name, 2, "bf16-mixed", FEW) for name in ("deepspeed_stage_2", "deepspeed_stage_3")]
    planned += [_row("ddp_fully_sharded", 2, word, FEW) for word in HALF if word != "bf16-true"]
    return planned


def forked_rows() -> list[Row]:
    """Launches that go on from this very process, and need one that has computed nothing. The last has one rank, for
    what that computes would keep the next from forking."""
    return [
        _row(name, size, precision, FEW)
        for name, size, precision in (
            ("ddp_fork", 2, "64-true"),
            ("ddp_notebook", 2, "32-true"),
            ("ddp_fork", 4, "32-true"),
            ("ddp_fork", 1, "64-true"),
        )
    ]


def _row(name: str, size: int, precision: str, some: Sequence[str], tolerance: float | None = None) -> Row:
    return Row(
        name=name,
        size=size,
        precision=precision,
        cases=tuple(some),
        make=lambda: make_strategy(name),
        tolerance=tolerance,
    )


def _made(name: str, size: int, precision: str, some: Sequence[str], make: Callable[[], Strategy]) -> Row:
    return Row(name=name, size=size, precision=precision, cases=tuple(some), make=make)


# Functions for strategies that need one. At the top level: ranks import them.


def in_shards(model: nn.Module, mesh: Any) -> None:
    """Blocks in shards, and the rest with the root."""
    from torch.distributed.fsdp import fully_shard

    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def in_both(model: nn.Module, mesh: Any) -> None:
    """Two layers cut along the tensor axis, one after the other, and all of it in shards."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for part in [*getattr(model, "blocks", ())] or [model]:
        parallelize_module(part, mesh["tensor"], {"hidden": ColwiseParallel(), "out": RowwiseParallel()})
    in_shards(model, mesh)


def averaged(module: nn.Module, context: ManualContext) -> Parallelized:
    """Data parallel, by the strategy's own averaging."""
    return Parallelized(module=module, averaged=module)
