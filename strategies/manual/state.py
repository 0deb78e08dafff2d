"""The state of a model parallelized by the user's `parallelize` function: unsharded tensors, under the user's names.

A DTensor knows its placements, and is gathered. A plain tensor can only be saved if it is a replica, so the ranks
compare theirs before they save.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import StateAccess, map_state
from fabric.strategies.checkpoint.tensors import replicated
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.sharding.sharded_state import ShardedState
from fabric.strategies.tensors.digest import numbers_of
from fabric.strategies.tensors.dtensor import as_sharded


def own_name(module: nn.Module, name: str) -> str:
    """The name of a tensor without the prefixes of DDP, `torch.compile` and `checkpoint_wrapper`."""
    pieces = []
    part: nn.Module | None = module
    for piece in name.split("."):
        if piece not in ("_orig_mod", "_checkpoint_wrapped_module") and not (
            piece == "module" and isinstance(part, DistributedDataParallel)
        ):
            pieces.append(piece)
        part = None if part is None else part._modules.get(piece)
    return ".".join(pieces)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by all their names, without the prefixes of wrappers."""
    return {own_name(module, name): each for name, each in module.named_parameters(remove_duplicate=False)}


def _renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """The state with other names, also of the submodules whose versions torch attaches to it."""
    renamed = OrderedDict((rename(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed._metadata = OrderedDict((rename(name), each) for name, each in versions.items())  # type: ignore[attr-defined]
    return renamed


@final
class ManualState(StateAccess):
    """The state of the module that `parallelize` returned, under the names without the prefixes of wrappers."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._sharded = ShardedState()

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        tensors, submodules = module.state_dict(), dict(module.named_modules(remove_duplicate=False))
        names = {own_name(module, name): name for name in (*submodules, *tensors)}
        self._sharded.write_module(module, _renamed(content, lambda name: names.get(name, name)), strict=strict)

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...] | None]:
        return {own_name(module, name): shape for name, shape in self._sharded.shapes(module).items()}

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        self._check({f"`{name}`": parameter for name, parameter in own_parameters(module).items()})
        state = self._sharded.read_module(module)
        for name, _ in module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = self._replicated(state[name])
        return _renamed(state, lambda name: own_name(module, name))

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_states(optimizer)
        content = self._sharded.read_optimizer(optimizer)
        return map_state(content, lambda index, name, value: self._replicated(value))

    def _replicated(self, value: Any) -> Any:
        """A plain tensor, which `_check` has found equal on all ranks: each of them saves a part."""
        return replicated(value, range(self._collective.size)) if isinstance(value, Tensor) else value

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        self._sharded.write_optimizer(optimizer, content)

    def _check_states(self, optimizer: Optimizer) -> None:
        self._check(
            {
                f"`{name}` in the optimizer's state of its parameter {index}": value
                for index, entries in sorted(optimizer.state_dict()["state"].items())
                for name, value in entries.items()
                if isinstance(value, Tensor)
            }
        )

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError, on every rank, unless the ranks have the same plain tensors, bit for bit. Ranks: all."""
        plain = {name: tensor for name, tensor in tensors.items() if as_sharded(tensor) is None}
        digests = self._collective.all_gather_object(dict(zip(plain, numbers_of(plain.values()), strict=True)))
        names = dict.fromkeys(name for of_rank in digests for name in of_rank)
        differing = [name for name in names if any(of_rank.get(name) != digests[0].get(name) for of_rank in digests)]
        if differing:
            raise RuntimeError(
                f"{differing[0]} differs between the ranks, and is no DTensor: a checkpoint would hold only rank 0's. "
                "If each rank has a shard, make it a DTensor (`context.shard`, or your own). If it is a replica, start "
                "from the same values and average the gradients (`Parallelized(averaged=...)`)."
            )
