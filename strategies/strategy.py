"""The interface of a strategy: how a model is distributed over devices.

A strategy is a frozen, picklable dataclass of options, without state: per-process state is in `Runtime`, per-model
state in `Prepared`. Code above this layer never asks which strategy it has; what differs between strategies is a method
here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Capability, Target
from fabric.strategies.data.partition import Use
from fabric.strategies.module.initialization import new_tensors
from fabric.strategies.module.wrap_policy import Policy
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared, attach_to_steps
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.parameters import uncompiled

_ARGS = "\n\nArgs:\n"


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """How a model is distributed over devices; defines its launchers, its collective and its data-loader hooks.

    Args:
        activation_checkpointing_policy: Submodules whose activations are recomputed in backward instead of stored:
            "blocks" (`blocks_of(model)`), classes, or a function of a module.
        activation_offload: Submodules whose activations wait for backward in pinned host memory, as those above; with
            both, what is recomputed from does.
    """

    marks_steps: ClassVar[bool] = False
    """Whether it marks the end of each step, for devices that record operations and run them as one graph."""
    initializes_meta: ClassVar[bool] = False
    """Whether `setup` initialises tensors on the meta device, after it has sharded them."""
    fills_from_rank_zero: ClassVar[bool] = False
    """Whether a model may be on the meta device on all ranks but rank 0."""
    activation_checkpointing_policy: Policy | None = None
    activation_offload: Policy | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Append the options of the class above to `Args:` of the docstring, so that `help()` explains them, too."""
        super().__init_subclass__(**keywords)
        doc, inherited = getdoc(cls) or "", (getdoc(cls.__base__) or "").partition(_ARGS)[2]
        if inherited not in doc:
            cls.__doc__ = f"{doc}\n{inherited}" if _ARGS in doc else f"{doc}{_ARGS}{inherited}"

    @property
    def lacks(self) -> Mapping[Capability, str]:
        """Unsupported capabilities, each with the error message that its use raises."""
        return {}

    @property
    @abstractmethod
    def launchers(self) -> tuple[str, ...]:
        """The launchers that can start it. If there are several, `Fabric(launcher=...)` chooses."""

    def num_processes(self, num_devices: int) -> int:
        """The number of processes on a node that has `num_devices` devices: one per device, or the calling process
        alone."""
        return 1 if self.launchers == ("inline",) else num_devices

    def in_one_process(self) -> "str | Strategy":
        """The strategy of the reference of `fabric verify`: one process that computes what the program means."""
        return "auto"

    def look_for_packages(self) -> Mapping[str, str]:
        """The installed optional packages that it needs, with what `refuse` must know of each.

        Called once for each `Fabric`, before `refuse`. Overridden by strategies with optional packages.
        """
        return {}

    @property
    def needs_function(self) -> bool:
        """Whether the option for the user's function (`parallelize_fn`), which the strategy runs, is missing."""
        return False

    @abstractmethod
    def refuse(self, target: Target) -> str | None:
        """None if it can run on the target; otherwise the error message: what was written, what is so, what to write.

        Reads nothing but `target`, which may describe another machine.
        """

    @abstractmethod
    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        """Select the device of this rank and connect to the other ranks.

        `devices`: the indices of this node's devices; `devices[world.local_rank]` is this rank's own.
        """

    def init_module(self, runtime: Runtime, *, empty: bool) -> AbstractContextManager[None]:
        """Context: modules are created where `setup` needs them, in the precision's dtype; `empty`: not initialised."""
        device = torch.device("meta") if empty and self.initializes_meta else runtime.device
        return new_tensors(device, runtime.precision, empty=empty)

    @abstractmethod
    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        """Distribute the model; `optimizers` then refer to its new parameters. `move=False`: do not move it to the
        device."""

    def units(self, module: nn.Module) -> list[str]:
        """The names of the submodules that `fully_shard` gathers one at a time; the rest of the model is gathered with
        the root. Under `fsdp` also of a model that is not set up yet."""
        from fabric.strategies.sharding.fully_shard import fsdp_modules

        units = {*fsdp_modules(uncompiled(module))}
        return [name for name, part in uncompiled(module).named_modules() if name and part in units]

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        """Prepare optimizers of a model that is already set up. Returns a function that undoes it.

        Overridden if attaching what every strategy does is not enough.
        """
        return attach_to_steps(runtime, optimizers)

    def process_dataloader(
        self, runtime: Runtime, loader: Iterable[Any], use: Use, *, distribute: bool, move: bool
    ) -> Iterable[Any]:
        """The loader, restricted to `runtime.share` (`distribute`), with its batches on the device (`move`)."""
        from fabric.strategies.loader_hook import share_loader

        return share_loader(runtime, loader, use, distribute=distribute, move=move)
