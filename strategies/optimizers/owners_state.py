"""The state of an optimizer whose parameters have owners: each rank has the states of those that it owns."""

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import StateAccess, by_saved_index
from fabric.strategies.checkpoint.tensors import in_memory, of_other_rank, of_rank
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.optimizers.owners import needs_owners, owners
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.sharded_state import ShardedState
from fabric.strategies.tensors.nests import map_only_tensors
from fabric.strategies.tensors.parameters import parameters_of
from fabric.strategies.tensors.wrapper_subclass import flattened


@final
class OwnersState(StateAccess):
    """The state of each parameter comes from its owner, one parameter at a time.

    `others`: the access to modules, and to optimizers whose parameters have no owners. `owner_of`: the owners.
    """

    def __init__(
        self,
        collective: Collective,
        others: StateAccess,
        *,
        is_owned: Callable[[Optimizer], bool] = lambda optimizer: True,
        owner_of: Callable[[Optimizer, int], Mapping[Tensor, int]] = owners,
    ) -> None:
        self.collective, self.others, self.is_owned, self.owner_of = collective, others, is_owned, owner_of

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        return self.others.read_module(module)

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        self.others.write_module(module, content, strict=strict)

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        self.others.load_module(module, content, strict=strict)

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        if self.is_owned(optimizer):
            self.write_optimizer(optimizer, content)
        else:
            self.others.load_optimizer(optimizer, content)

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        if self.is_owned(optimizer):
            optimizer.load_state_dict(in_memory(self._owned(optimizer, content)))
        else:
            self.others.write_optimizer(optimizer, content)

    def _owned(self, optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
        """The content without the states of parameters that other ranks own, which are not read."""
        owner, rank = self.owner_of(optimizer, self.collective.size), self.collective.rank
        left_out = {index for index, each in by_saved_index(optimizer, content).items() if owner.get(each) != rank}
        return {**content, "state": {key: one for key, one in content["state"].items() if key not in left_out}}

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.is_owned(optimizer):
            return self.others.read_optimizer(optimizer)
        held = held_state(optimizer)
        mine = {key: value for key, value in held["state"].items() if isinstance(key, int)}
        others = {key: value for key, value in held["state"].items() if key not in mine}
        return {**held, "state": {**others, **shards_by_owner(self.collective, mine)}}


def sharded_state(runtime: Runtime) -> OwnersState:
    """The state of sharded models, some of whose optimizers are stepped by owners."""
    return OwnersState(runtime.collective, ShardedState(), is_owned=needs_owners)


def held_state(optimizer: Optimizer) -> dict[str, Any]:
    """This rank's part of an optimizer's state, with indices in place of parameters, as in a state dict."""
    place: dict[Any, int] = {parameter: index for index, parameter in enumerate(parameters_of(optimizer))}
    groups = [{**group, "params": [place[each] for each in group["params"]]} for group in optimizer.param_groups]
    state = {
        place.get(key, key): each
        for key, each in optimizer.state.items()
        if key in place or not isinstance(key, Tensor)
    }
    return {"state": state, "param_groups": groups}


def shards_by_owner(collective: Collective, mine: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states of all parameters: those of this rank with their tensors, those of other ranks without. Ranks: all.

    Cost: each rank receives shapes and dtypes, about 100 bytes for each tensor.
    """
    mine = map_only_tensors(flattened, mine)
    whole: dict[int, dict[str, Any]] = {}
    for rank, owned in enumerate(collective.all_gather_object(of_other_rank(mine))):
        whole.update(of_rank(rank, mine) if rank == collective.rank else owned)
    return dict(sorted(whole.items()))
