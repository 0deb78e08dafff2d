"""The attributes that every strategy of Lightning Fabric has.

A strategy has one of the core, complete after its constructor. `fabric.strategy` is a copy of it that knows the fabric,
so that it has `root_device` and the like; on a strategy without a fabric these raise.
"""

import copy
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fabric.lightning.accelerators import Accelerator, accelerator_of
from fabric.lightning.plugins import Precision, precision_of
from fabric.lightning.unsupported import FABRIC_ARGUMENTS, refuse_arguments
from fabric.strategies.strategy import Strategy as CoreStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fabric.fabric import Fabric as CoreFabric


S = TypeVar("S", bound="Strategy")


class Strategy:
    """How a model is distributed over devices."""

    _core: CoreStrategy
    _fabric: "CoreFabric | None" = None
    saves_shards = False
    """Whether `fabric.save` writes a folder with the shards of each rank, not one file."""

    def core(self, num_nodes: int) -> CoreStrategy:
        """The core's strategy, for this number of nodes."""
        return self._core

    @classmethod
    def holding(cls: type[S], core: CoreStrategy) -> S:
        """A strategy of this class for one of the core."""
        made = cls.__new__(cls)
        made._core = core
        return made

    def within(self: S, fabric: "CoreFabric") -> S:
        """A copy that is bound to a fabric."""
        bound = copy.copy(self)
        bound._core, bound._fabric = fabric.strategy, fabric
        return bound

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator."""
        return accelerator_of(self._within.accelerator.name)

    @property
    def precision(self) -> Precision:
        """The precision; `strategy.precision.precision` is its name."""
        return precision_of(self._within.precision)

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._within.device

    @property
    def world_size(self) -> int:
        """The number of ranks over all nodes. Available before `launch`."""
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
    def device_mesh(self) -> "DeviceMesh | None":
        """The device mesh; None if the strategy has none."""
        return self._within.device_mesh

    def barrier(self, name: str | None = None) -> None:
        """Return once all ranks have called it."""
        self._within.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast an object from rank `src`. Ranks: all call it."""
        return self._within.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether the decision is True on all ranks, or on any."""
        return self._within.collective.reduce_boolean_decision(decision, require_all=all)

    @property
    def _within(self) -> "CoreFabric":
        if self._fabric is None:
            raise RuntimeError(
                f"This `{type(self).__name__}` was not passed to a `Fabric`, so it has no rank and no device. Use "
                "`fabric.strategy`."
            )
        return self._fabric


_LAUNCHERS = {"popen": "auto", "spawn": "spawn", "fork": "fork", "forkserver": "forkserver"}


class ParallelStrategy(Strategy):
    """A strategy of several processes."""

    @property
    def num_processes(self) -> int:
        """The number of processes on this node."""
        return self._within._configuration.topology.num_processes


def process_options(where: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The core's options for processes, from the arguments of the strategy `where` by name.

    Raises: ValueError, TypeError: a value is not allowed. UnsupportedError: an argument that belongs to `Fabric`.
    """
    refuse_arguments(where, arguments, FABRIC_ARGUMENTS)
    start_method, timeout = arguments.get("start_method", "popen"), arguments["timeout"]
    if start_method not in _LAUNCHERS:
        raise ValueError(f"`{where}(start_method={start_method!r})`: write one of {', '.join(map(repr, _LAUNCHERS))}.")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"`{where}(timeout={timeout!r})` is a `{type(timeout).__name__}`. Write a `datetime.timedelta`, such as "
            "`timedelta(minutes=30)`."
        )
    options = {"launcher": _LAUNCHERS[start_method], "backend": arguments["process_group_backend"]}
    return options if timeout is None else {**options, "timeout_seconds": timeout.total_seconds()}


def refuse_unknown(where: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise TypeError for an unknown option."""
    for name in options:
        if name not in known:
            raise TypeError(
                f"`{where}({name}=...)`: there is no such option here. Write one of {', '.join(sorted(known))}, or "
                "leave it out."
            )
