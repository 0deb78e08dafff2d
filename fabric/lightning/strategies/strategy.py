"""What every strategy answers, as code for Lightning Fabric asks it.

A strategy holds one of the core, complete from its constructor on. `Fabric` gives out a copy of it that knows the
fabric, so that `fabric.strategy.root_device` and the like can answer; one that no fabric has answers for none of them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fabric.lightning.accelerators import Accelerator, accelerator_of
from fabric.lightning.plugins.precision import Precision, precision_of
from fabric.strategies.strategy import Strategy as CoreStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fabric.fabric import Fabric as CoreFabric

S = TypeVar("S", bound="Strategy")


class Strategy:
    """How a model is distributed over devices."""

    _core: CoreStrategy
    _fabric: CoreFabric | None = None

    def core(self, num_nodes: int) -> CoreStrategy:
        """The core's strategy, for this number of nodes."""
        return self._core

    @classmethod
    def holding(cls: type[S], core: CoreStrategy) -> S:
        """A strategy of this class for one that the core has made."""
        made = cls.__new__(cls)
        made._core = core
        return made

    def within(self: S, fabric: CoreFabric) -> S:
        """A copy that answers for a fabric."""
        bound = copy.copy(self)
        bound._core, bound._fabric = fabric.strategy, fabric
        return bound

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device."""
        return accelerator_of(self._within.accelerator.name)

    @property
    def precision(self) -> Precision:
        """What numbers are made of; `strategy.precision.precision` is the word."""
        return precision_of(self._within.precision)

    @property
    def root_device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self._within.device

    @property
    def world_size(self) -> int:
        """How many ranks there are over all nodes, or will be."""
        return self._within._configuration.topology.size

    @property
    def global_rank(self) -> int:
        """This process's rank over all nodes."""
        return self._within.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._within.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self._within.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._within.is_global_zero

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The ranks along named axes; None where the strategy has no axes."""
        return self._within.device_mesh

    def barrier(self, name: str | None = None) -> None:
        """Return once all ranks have called it."""
        self._within.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give every rank the object of rank `src`."""
        return self._within.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decide so, or any."""
        return self._within.collective.reduce_boolean_decision(decision, require_all=all)

    @property
    def _within(self) -> CoreFabric:
        if self._fabric is None:
            raise RuntimeError(
                f"This `{type(self).__name__}` was passed to no `Fabric` yet, and knows no rank and no device. Ask "
                "`fabric.strategy`."
            )
        return self._fabric
