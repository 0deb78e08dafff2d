"""FSDP: every rank holds a shard of parameters, gradients and optimizer state; parameters are gathered while used.

Torch's `fully_shard` (FSDP2; Zhao et al., VLDB 2023; ZeRO-3: Rajbhandari et al., SC 2020) shards in place: the module
stays the user's own object, its class becomes a subclass of the user's, names stay, and parameters become `DTensor`s.
Every forward communicates, also in evaluation, so all ranks must run the same submodules in the same order (another
order raises, or times out if shapes differ). `state_dict()` returns shards; `fabric.save` writes full tensors.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.strategies.capabilities import Capability, Target
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero
from fabric.strategies.module import model_checks
from fabric.strategies.module.deepcopy import IN_SHARDS, Hook, refuse_copies
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.module.initialization import UninitializedTensors
from fabric.strategies.module.wrap_policy import Policy, check_policy, matching, num_bytes
from fabric.strategies.optimizers.owners import sharded_state
from fabric.strategies.optimizers.rebinding import rebinding
from fabric.strategies.precision.precision import Precision, cast_module
from fabric.strategies.prepared import Prepared, make_contiguous, make_prepared, with_precision
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import SHARDS, Layout, Runtime
from fabric.strategies.sharding.fully_shard import list_hidden_tensors_after, mark_gathering, restore_output_after
from fabric.strategies.sharding.mesh import check_degrees
from fabric.strategies.sharding.sharded_gradient_sync import ShardedGradientSync
from fabric.strategies.tensors.parameters import name_some, own_tensors, uncompiled
from fabric.strategies.tensors.wrapper_subclass import frozen_wrapped, move


@final
@dataclass(frozen=True, kw_only=True)
class FSDPStrategy(ProcessGroupStrategy):
    """Fully sharded data parallel: one process per device, each with a shard of the model and a share of the data.

    Weights are broadcast from rank 0. `Fabric.close` removes our hooks; the parameters stay sharded. Each part is moved
    to the device just before it is sharded, also with `move_to_device=False`.

    Args:
        auto_wrap_policy: Submodules whose parameters are all-gathered together, and freed again: "blocks", the
            submodules that repeat in the model and hold its parameters, such as transformer layers
            (`blocks_of(model)`); classes; or a function of a module, also of torch's form. Other parameters are
            gathered with the root. None: the whole model at once, which saves no memory in forward. A unit is gathered
            where it is called as a module, on all ranks in the same order; a tied weight and all its uses must be in
            one unit. `units(model)` lists the units.
        reshard_after_forward: Free gathered parameters after forward: less memory. False: keep them for backward, which
            saves the second all-gather. A number: keep them sharded over so many ranks. None: torch's default, freed
            except for the root's. Where they are kept, `parameters()` between forward and backward returns gathered
            copies, as torch's `fully_shard` documents: `zero_grad` then leaves the gradients of the shards, a forward
            after a step uses the weights from before it, and what is written to a copy is lost.
        device_mesh: (replicas, shards), whose product is the number of ranks: shards are on adjacent ranks, and
            replicas average gradients. "nodes": a replica on each node. None: one replica, over all ranks.
        cpu_offload: Keep shards, gradients and optimizer state in CPU memory, and step there.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 after each forward that
            computes gradients.
    """

    initializes_meta: ClassVar[bool] = True
    fills_from_rank_zero: ClassVar[bool] = True
    auto_wrap_policy: Policy | None = "blocks"
    reshard_after_forward: bool | int | None = True
    device_mesh: tuple[int, int] | Literal["nodes"] | None = None
    cpu_offload: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        check_policy(self.auto_wrap_policy, "auto_wrap_policy")
        mesh: Any = self.device_mesh
        is_pair = isinstance(mesh, (tuple, list)) and len(mesh) == 2 and all(isinstance(degree, int) for degree in mesh)
        if not (mesh is None or mesh == "nodes" or is_pair):
            raise ValueError(
                f"`device_mesh={mesh!r}`: write two whole numbers, `(replicas, shards)`, 'nodes', or None."
            )

    @property
    def lacks(self) -> Mapping[Capability, str]:
        return {"copies": IN_SHARDS, "scalars": model_checks.SCALARS}

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        return replace(SHARDS, forward_communicates=True, averages_before_hooks=True)

    def why_not(self, target: Target) -> str | None:
        if self.cpu_offload and target.accelerator.name == "cpu":
            return (
                "`cpu_offload=True` (`strategy='fsdp_cpu_offload'`) moves shards from a device to the CPU, but "
                "`accelerator='cpu'` has them there already. Pass `strategy='fsdp'`, or another accelerator."
            )
        return None

    def degrees(self, size: int, num_nodes: int) -> dict[str, int]:
        if self.device_mesh is None:
            degrees = {"shard": size}
        elif self.device_mesh == "nodes":
            degrees = {"replicate": num_nodes, "shard": size // num_nodes}
        else:
            degrees = dict(zip(("replicate", "shard"), self.device_mesh, strict=True))
        check_degrees(degrees, size, written=f"device_mesh={self.device_mesh!r}")
        return degrees

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        inner = uncompiled(module)
        model_checks.refuse_sharded(inner, _LEAVE_OUT)
        if runtime.world.size > 1:
            model_checks.refuse_sparse_layers("fsdp", inner)
        units = self._units(inner, runtime.precision)
        model_checks.refuse_tied_apart(inner, units, "auto_wrap_policy")
        model_checks.refuse_scalars(inner)
        if runtime.world.size > 1 and (words := self._words(inner)) is not None:
            runtime.report(words)
        if runtime.world.size > 1 and (whole := frozen_wrapped(inner)):
            runtime.report(_WHOLE.format(model=type(inner).__name__, count=len(whole), names=name_some(list(whole))))
        uninitialized, hooks = UninitializedTensors(inner), list[RemovableHandle]()

        def shard(part: nn.Module) -> None:
            if part in units:
                # The hook of `fully_shard`, and no hook of the user's, sees what the first of these returns.
                hooks.append(part.register_forward_hook(Hook(list_hidden_tensors_after)))
                self._shard(runtime, part, units)
                hooks.append(part.register_forward_hook(Hook(restore_output_after)))

        with rebinding(inner, optimizers):
            cast_module(runtime.precision, inner)
            make_contiguous(inner)
            uninitialized.fill_all(inner, runtime.device, runtime.collective, then=shard)
        sync = ShardedGradientSync(runtime, inner, uninitialized, broadcast_buffers=self.broadcast_buffers)
        path = ForwardPath(inner, with_precision(runtime, sync.forward), partial(mark_gathering, inner))
        made = make_prepared(
            runtime, module, optimizers, sync, path, *(hook.remove for hook in hooks), refuse_copies(inner, IN_SHARDS)
        )
        return replace(made, state=sharded_state(runtime))

    def units(self, module: nn.Module) -> list[str]:
        chosen = self._chosen(uncompiled(module))
        return [name for name, part in uncompiled(module).named_modules() if name and part in chosen]

    def _chosen(self, module: nn.Module) -> list[nn.Module]:
        return matching(module, self.auto_wrap_policy, "auto_wrap_policy")

    def _words(self, module: nn.Module) -> str | None:
        """What "blocks" has chosen, or that a large model is gathered at once."""
        kinds = Counter(type(unit).__name__ for unit in self._chosen(module) if unit is not module)
        if kinds and self.auto_wrap_policy == "blocks":
            blocks = ", ".join(f"{number} `{kind}`" for kind, number in kinds.items())
            return (
                f"`strategy='fsdp'` gathers the weights of {blocks} one at a time, and all others with the root. "
                "`FSDPStrategy(auto_wrap_policy=...)` takes other classes, or None."
            )
        if kinds or num_bytes([module]) < _SMALL_BYTES:
            return None
        return (
            f"`{type(module).__name__}` has {num_bytes([module]) / 2**30:.1f} GiB of parameters, and `strategy='fsdp'` "
            "gathers all of them at once on every rank, which saves no memory in forward. Name the classes of its "
            "largest submodules: `FSDPStrategy(auto_wrap_policy={...})`."
        )

    def _units(self, module: nn.Module, precision: Precision) -> set[nn.Module]:
        """The submodules that are gathered one by one, including the root."""
        units = {*self._chosen(module), module}
        # Statistics stay in full precision, and BatchNorm needs its weights in the same dtype.
        return units.union(part for part in module.modules() if precision.is_mixed and isinstance(part, _BatchNorm))

    def _shard(self, runtime: Runtime, unit: nn.Module, units: set[nn.Module]) -> None:
        """Broadcast the unit's own tensors from rank 0, on the device, and shard them."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        tensors = own_tensors(unit, units)
        for tensor in tensors:
            move(tensor, runtime.device)
        if runtime.world.size > 1:
            broadcast_from_rank_zero(runtime.collective, tensors)
        mixed = runtime.precision.is_mixed and not isinstance(unit, _BatchNorm)
        fully_shard(
            unit,
            mesh=runtime.mesh,
            reshard_after_forward=self.reshard_after_forward,
            # Autocast decides about the dtype of inputs, as under every strategy; outputs are not cast.
            mp_policy=MixedPrecisionPolicy(
                param_dtype=runtime.precision.compute_dtype if mixed else None,
                reduce_dtype=runtime.precision.reduce_dtype if mixed else None,
                cast_forward_inputs=False,
            ),
            offload_policy=CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
            ignored_params=set(frozen_wrapped(unit).values()),
        )


_SMALL_BYTES = 2**28
"""With fewer bytes of parameters (256 MiB), gathering the whole model at once needs no warning."""

_WHOLE = (
    "{count} frozen parameters of `{model}` ({names}) are of classes of their own, such as quantised weights, which "
    "`fully_shard` cannot shard: they stay whole on each rank."
)
_LEAVE_OUT = (
    "Leave `fully_shard` out, and write `FSDPStrategy(auto_wrap_policy={{{name}}})`; or call it in "
    "`ModelParallelStrategy(parallelize_fn=function, shard='auto')`."
)
