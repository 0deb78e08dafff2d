"""The role of a strategy: how one model's numbers lie over devices.

A strategy is a frozen dataclass of options, complete from its constructor on and picklable. It holds no state: what
differs from process to process is in the `Runtime`, what differs from model to model in the `Prepared`. Nothing
above it asks which strategy it is; a question that differs between strategies is a method here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Capability
from fabric.strategies.data.share import Use
from fabric.strategies.module.initialization import new_tensors
from fabric.strategies.module.prepare import attach_scaler, share_loader
from fabric.strategies.module.wrap_policy import Policy
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.target import Target


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """How a model lies over devices; owns its launchers, its collective and its data-loader hooks."""

    activation_checkpointing_policy: Policy | None = None
    """The submodules whose activations are computed again in backward instead of being kept: classes, or a function of
    a module. `Fabric.setup` sees to it, the same way under every strategy."""

    @property
    def lacks(self) -> Mapping[Capability, str]:
        """What a loop cannot have, each with the sentence that the call raises. What is not in here holds."""
        return {}

    @property
    def marks_steps(self) -> bool:
        """Whether it marks where a step ends, which devices need that record operations and run them as one graph."""
        return False

    @property
    @abstractmethod
    def launchers(self) -> tuple[str, ...]:
        """The launcher words that can start it. More than one: which is left to `Fabric(launcher=...)`."""

    def num_processes(self, num_devices: int) -> int:
        """How many processes a node runs to use `num_devices` devices: one per device, or the calling process alone."""
        return 1 if self.launchers == ("inline",) else num_devices

    def look_for_packages(self) -> Mapping[str, str]:
        """The optional packages that it needs and that are installed here, with what `refuse` has to know of each.

        Called once for each `Fabric`, before `refuse`. Overridden where there are any.
        """
        return {}

    @abstractmethod
    def refuse(self, target: Target) -> str | None:
        """None where it can run so; otherwise a sentence with what was written, what is so, and what to write.

        Looks at nothing but `target`: it is asked about machines that are not this one.
        """

    @abstractmethod
    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        """Take the device of this rank and meet the other ranks.

        `devices`: the indices of this node's devices, `devices[world.local_rank]` being this rank's own.
        """

    def init_module(self, runtime: Runtime, *, empty: bool) -> AbstractContextManager[None]:
        """Within it, modules are made where `setup` wants them, in the precision's dtype; `empty`: without values.

        Overridden where that is not the rank's device.
        """
        return new_tensors(runtime.device, runtime.precision, empty=empty)

    @abstractmethod
    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        """Lay the model over the devices; `optimizers` follow its parameters. `move=False` leaves it where it is."""

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        """Prepare optimizers whose parameters belong to a model that is already set up. Returns what undoes it.

        Overridden where more is needed than that the loss scaler unscales before a step.
        """
        return attach_scaler(runtime.loss_scaler, optimizers)

    def process_dataloader(
        self, runtime: Runtime, loader: Iterable[Any], use: Use, *, distribute: bool, move: bool
    ) -> Iterable[Any]:
        """The same loader, cut to `runtime.share` (`distribute`), its batches on the device (`move`)."""
        return share_loader(runtime, loader, use, distribute=distribute, move=move)
