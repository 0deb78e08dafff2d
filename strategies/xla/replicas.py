"""The whole model on every device of XLA; gradients are averaged after each backward.

On a TPU a replica is a process, on PJRT's CPU client a thread; nothing here knows which. What surprises: a step is
three graphs: forward with backward, the averages, the optimizer. In one, the averages could overlap with backward; but
a rank that alone reads a loss would then run another graph than the others, and collectives meet only in equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import is_not
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Capability
from fabric.strategies.collectives.call_check import agree
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.module.bare_parameters import IN_MODULE
from fabric.strategies.module.buffers import buffers_of, follow_rank_zero
from fabric.strategies.module.changes import Contents
from fabric.strategies.module.prepare import replica
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.strategy import Strategy
from fabric.strategies.target import Target, releases
from fabric.strategies.xla.collective import XLACollective
from fabric.strategies.xla.device import (
    XLAState,
    marked_batches,
    place,
    prepare_module,
    prepare_optimizers,
    refuse_accelerator,
    seed_device,
)


@final
@dataclass(frozen=True, kw_only=True)
class XLAStrategy(Strategy):
    """Data parallel over XLA: a replica for each device, each with the whole model and its own share of the data.

    `strategy="ddp"` with `accelerator="xla"` is this one.
    """

    timeout_seconds: float = 1800.0
    """How long the ranks wait for each other when they meet."""
    find_unused_parameters: bool = False
    """Let all ranks say after each backward which parameters have gradients, and count the others as zero. Costs a
    message that the host waits for. Without it, a parameter that is used in some steps alone raises."""
    broadcast_buffers: bool = True
    """Buffers (the statistics of BatchNorm) follow rank 0 after every forward that computes gradients."""
    cpu_replicas: bool = False
    """Start several replicas on PJRT's CPU client, too. As shipped, torch_xla 2.9 hangs there in the first collective;
    for who has mended that, as our tests have."""

    @property
    def lacks(self) -> Mapping[Capability, str]:
        always: dict[Capability, str] = {"bare_parameters": IN_MODULE}
        return always if self.find_unused_parameters else {**always, "unused": _UNUSED}

    @property
    def marks_steps(self) -> bool:
        return True

    @property
    def launchers(self) -> tuple[str, ...]:
        return ("xla",)

    def look_for_packages(self) -> Mapping[str, str]:
        return releases("torch_xla")

    def refuse(self, target: Target) -> str | None:
        sentence = refuse_accelerator("xla", target)
        if sentence is not None or target.size == 1:
            return sentence
        if target.num_devices != target.num_available:
            return (
                f"`devices={target.num_devices}` with `strategy='xla'` (or 'ddp' over XLA), but PJRT has "
                f"{target.num_available} devices here, and runs a replica on each. Leave `devices` out, or show "
                "PJRT fewer: by CPU_NUM_DEVICES, or by TPU_VISIBLE_CHIPS on a TPU."
            )
        if target.platform == "CPU" and not self.cpu_replicas:
            return (
                f"`strategy='xla'` (or 'ddp' over XLA) with {target.num_devices} replicas on PJRT_DEVICE=CPU: "
                "torch_xla 2.9 hangs there in the first collective, and ends the process after 15 s. Write "
                "`strategy='xla_fsdp'`, which is one program over all devices, or `devices=1`; on a TPU `xla` runs on "
                "all."
            )
        return None

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        import torch_xla

        if world.size == 1:
            accelerator.connect(devices[0])
        device = torch_xla.device()  # this replica's, be it a process or a thread
        seed_device()
        several = XLACollective(world, timeout_seconds=self.timeout_seconds)
        collective = several if world.size > 1 else SingleDeviceCollective()
        return open_runtime(world, [device], collective, precision, carry=marked_batches)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        if runtime.world.size > 1 and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise ValueError(_SYNC_BATCH_NORM)
        place(runtime, module, optimizers, to_device=move)
        averaging = _Averaging(self, runtime.collective, module)
        undo = prepare_module(module, optimizers)
        prepared = replica(
            runtime,
            module,
            optimizers,
            around=averaging.forward if runtime.world.size > 1 else None,
            unsynced=averaging.unsynced,
            watches=(averaging.watch,),
            end=undo,
        )
        return replace(prepared, state=XLAState(runtime.world.rank))

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        return prepare_optimizers(runtime, optimizers)


@final
class _Averaging:
    """One model's averaging. Made by all ranks together; alone there is nothing to average.

    # Note [Averages are new tensors]
    torch_xla's own `reduce_gradients` and `optimizer_step` reduce `.grad` in place, and 2.9 loses that wherever `.grad`
    was changed in place before: by a second backward, by clipping, by unscaling. Replicas then drift apart without a
    word. So an average is recorded as a new tensor, which becomes `.grad`. What was averaged before is the same on
    every rank, and its average is itself: `.grad` as a whole is averaged, however backwards alternate.
    """

    def __init__(self, options: XLAStrategy, collective: Collective, module: nn.Module) -> None:
        self.collective = collective
        self.module = module
        self.synced = True
        self.finds_unused = options.find_unused_parameters
        self.broadcast_buffers = options.broadcast_buffers and collective.size > 1
        self.alike: Contents | None = None  # these started from rank 0's values
        self._arrange()

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and not self._is_arranged():
            self._arrange()
        output = function(*args, **kwargs)
        if self.synced and torch.is_grad_enabled():
            follow_rank_zero(self.collective, buffers_of(self.buffered))
        return output

    def _is_arranged(self) -> bool:
        """Whether what is averaged is what is trained. A model that is frozen as a whole for a while stays so."""
        if not self.contents.is_as_it_was():
            return False
        flags = self.contents.flags()
        return flags == self.flags or not any(flags)

    def _arrange(self) -> None:
        """Average what is trained now; what is new starts from rank 0's values. Ranks: all."""
        self.contents = Contents(self.module)
        self.flags = self.contents.flags()
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.buffered = self.contents.modules if self.broadcast_buffers else []
        self.used: frozenset[str] | None = None
        if self.collective.size > 1:
            follow_rank_zero(self.collective, self.contents.new_since(self.alike))
            self.alike = self.contents

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        before, self.synced = self.synced, False
        try:
            yield
        finally:
            self.synced = before

    def watch(self) -> Callable[[], None] | None:
        if not self.synced or self.collective.size == 1 or not self.parameters:
            return None
        before = [parameter.grad for parameter in self.parameters.values()]
        versions = [grad._version for grad in before if grad is not None]

        def average() -> None:
            after = [parameter.grad for parameter in self.parameters.values()]
            if any(map(is_not, after, before)) or versions != [g._version for g in before if g is not None]:
                self._average()

        return average

    @torch.no_grad()
    def _average(self) -> None:
        used = self._used_everywhere()
        assert isinstance(self.collective, XLACollective)
        means = self.collective.means([p.grad for p in used if p.grad is not None])
        for parameter, mean in zip(used, means, strict=True):
            parameter.grad = mean

    def _used_everywhere(self) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged, the same on every rank."""
        mine = frozenset(name for name, parameter in self.parameters.items() if parameter.grad is not None)
        if self.finds_unused:
            return self._used_anywhere()
        if self.used is None:
            agree(self.collective, "\n".join([f"backward of `{type(self.module).__name__}`", *sorted(mine)]))
            self.used = mine
        if mine != self.used:
            raise RuntimeError(
                f"In this backward of `{type(self.module).__name__}`, {', '.join(sorted(mine ^ self.used))} took part "
                f"otherwise than in the first. {_UNUSED}"
            )
        return [parameter for name, parameter in self.parameters.items() if name in mine]

    def _used_anywhere(self) -> list[nn.Parameter]:
        """Those with a gradient on any rank; where this rank has none it is made, of zeros."""
        parameters = list(self.parameters.values())
        present = torch.tensor([parameter.grad is not None for parameter in parameters], device="cpu")
        anywhere = self.collective.all_reduce(present, "max").tolist()
        used = [parameter for parameter, there in zip(parameters, anywhere, strict=True) if there]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return used


_SYNC_BATCH_NORM = (
    "SyncBatchNorm over several replicas of `strategy='xla'`: torch's has no messages over XLA, and each replica would "
    "go by the statistics of its own share. Write `nn.BatchNorm2d` (or 1d, 3d) for that, or `strategy='xla_fsdp'`, "
    "where BatchNorm's statistics are those of the whole batch."
)
_UNUSED = (
    "All replicas average the same parameters in every step. Pass "
    "`XLAStrategy(find_unused_parameters=True)` for a model that leaves some out."
)
