"""The whole model in every process; gradients are averaged over the ranks while backward still runs.

Torch's DistributedDataParallel averages the gradients (Li et al., VLDB 2020). It is kept beside the user's module, not
around it: the user calls, saves and inspects the original module. Forward without gradients does not communicate, so
rank 0 may evaluate alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import nn
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level
from torch.optim import Optimizer

from fabric.strategies.capabilities import Capability, Target
from fabric.strategies.checkpoint.state import PlainState
from fabric.strategies.ddp.comm_hooks import CommHook, check, why_not
from fabric.strategies.ddp.ddp_gradient_sync import STATIC, UNUSED, DDPGradientSync
from fabric.strategies.optimizers.elementwise import refuse_dependent
from fabric.strategies.optimizers.owners import OwnersState, step_by_owners
from fabric.strategies.prepared import Prepared, attach_scaler, place, replica
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import Layout, Runtime
from fabric.strategies.undo import undo_all


@final
@dataclass(frozen=True, kw_only=True)
class DDPStrategy(ProcessGroupStrategy):
    """Distributed data parallel: one process per device, each with the whole model and its own share of the data.

    Args:
        bucket_bytes: Size of the gradients in one all-reduce. Larger: fewer messages. Smaller: more overlap with
            backward.
        find_unused_parameters: Find unused parameters after each forward, and do not wait for their gradients. Costs a
            traversal of the graph. False: a parameter without a gradient raises in the next step.
        static_graph: Every step uses the same parameters, which lets torch optimise.
        gradient_as_bucket_view: Gradients share memory with the buckets: saves one copy of the gradients, which cannot
            be detached then.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 after each forward that
            computes gradients.
        comm_hook: How gradients are reduced. None: in their own dtype. "bf16", "fp16": rounded. `PowerSGD(...)`: as
            low-rank factors. A function `(state, bucket)`: for torch's `register_comm_hook`, with None as `state`.
        shard_optimizer: Shard the optimizer state: each rank steps its share of the parameters (ZeRO-1). For optimizers
            that compute a parameter's step from its own gradient alone: all of torch's except LBFGS.
    """

    bucket_bytes: int = 25 * 2**20
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    comm_hook: CommHook | None = None
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        check(self.comm_hook)

    @property
    def lacks(self) -> Mapping[Capability, str]:
        if self.static_graph:
            return {"accumulate": STATIC}
        return {} if self.find_unused_parameters else {"unused": UNUSED}

    def why_not(self, target: Target) -> str | None:
        return why_not(self.comm_hook, self.backend or target.accelerator.backend)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        if runtime.device.type == "cpu" and get_debug_level() == DebugLevel.DETAIL:
            raise RuntimeError(_DETAIL)
        shards = self.shard_optimizer and runtime.world.size > 1
        if shards:
            refuse_dependent(optimizers, _WHOLE, flat=False)
        place(runtime, module, optimizers, move=move)
        sync, plain = DDPGradientSync(self, runtime, module), PlainState(runtime.world.size)
        uncompilable = _SMALL if self.bucket_bytes < _FIRST_BUCKET_BYTES else None
        prepared = replica(runtime, module, optimizers, sync, uncompilable=uncompilable)
        if not shards:
            return replace(prepared, state=plain)
        end = step_by_owners(runtime.collective, optimizers)
        return replace(
            prepared,
            layout=Layout(optimizer_states="shards"),
            state=OwnersState(runtime.collective, plain),
            release=undo_all((prepared.release, end)),
        )

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        if not self.shard_optimizer or runtime.world.size == 1:
            return attach_scaler(runtime.loss_scaler, optimizers)
        refuse_dependent(optimizers, _WHOLE, flat=False)
        scaled = attach_scaler(runtime.loss_scaler, optimizers)
        return undo_all((scaled, step_by_owners(runtime.collective, optimizers)))


_WHOLE = (
    "`shard_optimizer=True` cannot run `{optimizer}`: it computes each step from all gradients, and a rank steps a "
    "part of the parameters. Leave `shard_optimizer` out."
)


_FIRST_BUCKET_BYTES = 2**20
"""Of torch's reducer, at which its compiler backend for DistributedDataParallel begins to cut graphs."""
_SMALL = (
    f"`torch.compile` cuts its graphs by the buckets of gradients, the first of {_FIRST_BUCKET_BYTES} bytes, and takes "
    "no smaller ones. Write `DDPStrategy(bucket_bytes=...)` of so many or more."
)
_DETAIL = (
    "TORCH_DISTRIBUTED_DEBUG=DETAIL: with it torch's DistributedDataParallel ends the process by SIGSEGV on the CPU "
    "(torch 2.9 to 2.13). Write INFO. `Fabric(sanitize='always')` compares every collective over the ranks, as "
    "DETAIL is to do."
)
