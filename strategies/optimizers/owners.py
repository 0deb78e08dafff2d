"""Each parameter of an optimizer is stepped whole by one rank, its owner, which alone has its state.

For optimizers that compute an update from a whole parameter (Muon, Adafactor, SOAP), where parameters are in shards;
and for all optimizers under `DDPStrategy(shard_optimizer=True)` (ZeRO, stage 1: Rajbhandari et al., SC 2020). The
optimizer stays the user's own: while its `step` runs, its groups have the parameters that this rank owns, whole.
Before the step, the owners receive the shards of values and gradients; after it, they send back the new values.
Between steps the optimizer, its schedulers and clipping are as without owners.

Cost: for each `ROUND_BYTES` that a rank owns, a step sends one message to the owners, if there are shards, and one
back. A message has a slice for each rank, as long as the largest. During a step an owner has its parameters and their
gradients whole.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import StateAccess, by_saved_index
from fabric.strategies.checkpoint.tensors import in_memory, of_all_ranks
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.optimizers.elementwise import takes_plain_tensors, updates_each
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.sharded_state import ShardedState
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.chunk import Chunk
from fabric.strategies.tensors.chunk import whole as whole_chunk
from fabric.strategies.tensors.dtensor import as_sharded, local_chunk, local_part
from fabric.strategies.tensors.nests import map_only_tensors
from fabric.strategies.tensors.packing import Packing, Spec
from fabric.strategies.tensors.parameters import parameters_of
from fabric.strategies.tensors.wrapper_subclass import flattened
from fabric.strategies.undo import undo_all

ROUND_BYTES = 2**25
"""Parameters are moved in rounds, of this size on each rank, which bounds the memory of the messages."""
_ALIGNED_BYTES = 16
_Part: TypeAlias = tuple[Tensor, Chunk, bool]
"""A parameter, a chunk of it, and whether its gradient is meant."""


def owners(optimizer: Optimizer, size: int) -> dict[Tensor, int]:
    """The owner of each parameter: the largest of a group first, each to the rank that has the fewest elements so far.

    Groups that are added later do not change the owners of earlier ones.
    """
    loads, owner = [0] * size, dict[Tensor, int]()
    for group in optimizer.param_groups:
        for parameter in sorted(group["params"], key=Tensor.numel, reverse=True):
            owner[parameter] = loads.index(min(loads))
            loads[owner[parameter]] += parameter.numel()
    return owner


def needs_owners(optimizer: Optimizer) -> bool:
    """Whether the optimizer steps whole parameters only, and has some in shards."""
    return has_shards(optimizer) and (takes_plain_tensors(optimizer) or updates_each(optimizer) == "parameter")


def has_shards(optimizer: Optimizer) -> bool:
    """Whether some of its parameters are in shards."""
    return any(as_sharded(parameter) is not None for parameter in parameters_of(optimizer))


def refuse_shards(optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError for an optimizer that computes each step from all parameters, and has some in shards."""
    for optimizer in optimizers:
        if has_shards(optimizer) and updates_each(optimizer) == "model":
            raise ValueError(_AT_ONCE.format(optimizer=type(optimizer).__name__))


def refuse_owners(optimizers: Iterable[Optimizer], where: str) -> None:
    """Raise ValueError for an optimizer that needs owners, for strategies whose ranks may have different models.

    `where`: what was written, for the message.
    """
    for optimizer in filter(needs_owners, optimizers):
        raise ValueError(_NO_OWNERS.format(optimizer=type(optimizer).__name__, where=where))


def step_by_owners(collective: Collective, optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Let each rank step, and keep state for, the parameters that it owns. Returns a function that removes the hooks.

    Ranks: all call it, and from then on `step` of each optimizer; state stays with its owners afterwards.
    """
    return undo_all(undo for optimizer in optimizers for undo in _OwnedSteps(collective, optimizer).attach())


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[Callable[[], Any]], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of `step`, with `call(closure)` in place of the closure; None if there is no closure."""
    if len(args) > 1 and args[1] is not None:  # args[0] is the optimizer
        return (args[0], partial(call, args[1]), *args[2:]), kwargs
    closure = kwargs.get("closure")
    return None if closure is None else (args, {**kwargs, "closure": partial(call, closure)})


@final
class _OwnedSteps:
    """The steps of one optimizer."""

    def __init__(self, collective: Collective, optimizer: Optimizer) -> None:
        self._collective, self._optimizer = collective, optimizer
        self._owner: dict[Tensor, int] = {}
        self._chunks: dict[Tensor, Sequence[Chunk]] = {}
        """The chunk of each parameter that each rank holds."""
        self._planned: list[Any] = []
        """Ids and dtypes of the parameters for which `_rounds` was made."""
        self._rounds: list[tuple[_Message, _Message]] = []
        self._groups: list[list[Tensor]] = []
        """The parameters of the groups between steps; filled while a step runs."""
        self._whole: dict[Tensor, Tensor] = {}
        """For each sharded parameter that this rank owns, the whole parameter that is stepped in its place."""
        self._deal()
        self._drop_others()

    def attach(self) -> list[Callable[[], None]]:
        return [
            hook_steps(self._optimizer, self._before_step, lambda *_: self._send_back()),
            self._optimizer.register_state_dict_pre_hook(refuse_part).remove,
        ]

    def _deal(self) -> None:
        owner = owners(self._optimizer, self._collective.size)
        if any(owner.get(parameter) != rank for parameter, rank in self._owner.items()):
            raise RuntimeError(_TAKEN_OUT.format(optimizer=type(self._optimizer).__name__))
        self._owner = owner
        of_ranks = self._collective.all_gather_object([_own_chunk(parameter) for parameter in self._owner])
        self._chunks = dict(zip(self._owner, zip(*of_ranks, strict=True), strict=True))
        self._planned = []

    def _is_own(self, parameter: Any) -> bool:
        return self._owner.get(parameter, self._collective.rank) == self._collective.rank

    def _drop_others(self) -> None:
        """Drop the state of parameters of other owners, which `load_state_dict` gives every rank."""
        for parameter in [each for each in self._optimizer.state if not self._is_own(each)]:
            del self._optimizer.state[parameter]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._groups:
            self._put_back()
            raise RuntimeError(_NOT_OVER.format(optimizer=type(optimizer).__name__))
        replaced = with_closure(args, kwargs, self._call)
        if replaced is None:
            self._take()
        return replaced

    def _call(self, closure: Callable[[], Any]) -> Any:
        """The user's closure, which computes all gradients anew, in the middle of a step."""
        self._send_back()
        loss = closure()
        self._take()
        return loss

    @torch.no_grad()
    def _take(self) -> None:
        """Give the groups the parameters that this rank owns, whole."""
        given = parameters_of(self._optimizer)
        if len(given) != len(self._owner) or any(parameter not in self._owner for parameter in given):
            self._deal()
        self._drop_others()
        moved = [parameter for parameter in self._owner if parameter.grad is not None]
        self._plan(moved)
        for parameter in moved:
            if self._is_own(parameter) and as_sharded(parameter) is not None:
                self._whole[parameter] = _whole_of(parameter)
        for there, _ in self._rounds:
            there.send(self._collective, self._shard, self._part_of_whole)
        self._groups = [group["params"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = [self._whole.get(each, each) for each in group["params"] if self._is_own(each)]
        self._rename_states(self._whole)

    @torch.no_grad()
    def _send_back(self) -> None:
        """Send the owners' new values to every rank, and restore the groups."""
        if not self._groups:
            return
        for parameter, whole in self._whole.items():
            local_part(parameter).copy_(whole[_own_chunk(parameter).slices_in(whole_chunk(whole.shape))])
        for _, back in self._rounds:
            back.send(self._collective, self._part_of_whole, self._shard)
        self._put_back()

    def _put_back(self) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=False):
            group["params"] = parameters
        self._rename_states({whole: parameter for parameter, whole in self._whole.items()})
        self._groups, self._whole = [], {}

    def _rename_states(self, names: Mapping[Tensor, Tensor]) -> None:
        state = self._optimizer.state
        for old, new in names.items():
            if old in state:
                state[new] = state.pop(old)

    def _shard(self, parameter: Tensor, chunk: Chunk, of_gradient: bool) -> Tensor:
        """The part of a parameter, or of its gradient, that this rank holds."""
        return local_part(_value(parameter, of_gradient))

    def _part_of_whole(self, parameter: Tensor, chunk: Chunk, of_gradient: bool) -> Tensor:
        """A chunk of a parameter that this rank owns, or of its gradient."""
        whole = _value(self._whole.get(parameter, parameter), of_gradient)
        return whole[chunk.slices_in(whole_chunk(whole.shape))]

    def _plan(self, moved: list[Tensor]) -> None:
        """Make the messages that move these parameters, unless those of the step before fit."""
        planned = [*map(id, moved), *map(attrgetter("dtype"), moved)]
        if planned == self._planned:
            return
        self._planned, self._rounds = planned, []
        start = num_bytes = 0
        for stop, parameter in enumerate(moved, 1):
            num_bytes += parameter.numel() * parameter.itemsize
            if num_bytes >= ROUND_BYTES * self._collective.size or stop == len(moved):
                self._rounds.append(self._messages(moved[start:stop]))
                start, num_bytes = stop, 0

    def _messages(self, parameters: Sequence[Tensor]) -> "tuple[_Message, _Message]":
        """To the owners, and back."""
        there, back = _Message(self._collective), _Message(self._collective)
        for parameter in parameters:
            owner, chunks = self._owner[parameter], self._chunks[parameter]
            known = {chunks[owner]}
            for rank, chunk in enumerate(chunks):
                if rank != owner and chunk.numel:
                    if chunk not in known:
                        there.add(rank, owner, [(parameter, chunk, False), (parameter, chunk, True)])
                    back.add(owner, rank, [(parameter, chunk, False)])
                    known.add(chunk)
        return there, back


def refuse_part(optimizer: Optimizer) -> None:
    """A hook of `optimizer.state_dict()` where each rank has the state of a part of the model."""
    raise RuntimeError(_PART.format(optimizer=type(optimizer).__name__))


@final
class _Message:
    """Parts of parameters that ranks exchange in one all-to-all. Every rank knows the parts of all ranks."""

    def __init__(self, collective: Collective) -> None:
        self._rank = collective.rank
        self._num_bytes: Counter[tuple[int, int]] = Counter()
        self._sent: dict[int, list[_Part]] = {}
        self._received: dict[int, list[_Part]] = {}

    def add(self, source: int, destination: int, parts: Sequence[_Part]) -> None:
        for parameter, chunk, _ in parts:
            self._num_bytes[source, destination] += chunk.numel * parameter.itemsize
        if source == self._rank:
            self._sent.setdefault(destination, []).extend(parts)
        if destination == self._rank:
            self._received.setdefault(source, []).extend(parts)

    def send(self, collective: Collective, read: Callable[..., Tensor], written: Callable[..., Tensor]) -> None:
        """Send `read(part)` for each part of this rank, and copy each part that arrives into `written(part)`."""
        if not self._num_bytes:
            return
        width = -(-max(self._num_bytes.values()) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        slices = torch.empty((collective.size, width), dtype=torch.uint8, device=collective.device)
        for rank, parts in self._sent.items():
            packing = _packing(parts)
            slices[rank, : packing.num_bytes] = packing.pack([read(*part) for part in parts])
        arrived = collective.all_to_all(slices)
        for rank, parts in self._received.items():
            packing = _packing(parts)
            for part, values in zip(parts, packing.unpack(arrived[rank : rank + 1, : packing.num_bytes]), strict=True):
                written(*part).copy_(values[0])


def _value(parameter: Tensor, of_gradient: bool) -> Tensor:
    value = parameter.grad if of_gradient else parameter
    assert value is not None
    return value


def _packing(parts: Iterable[_Part]) -> Packing:
    return Packing([Spec(parameter.dtype, chunk.shape, parameter.device.type) for parameter, chunk, _ in parts])


def _own_chunk(parameter: Tensor) -> Chunk:
    sharded = as_sharded(parameter)
    return whole_chunk(parameter.shape) if sharded is None else local_chunk(sharded)


def _whole_of(parameter: Tensor) -> nn.Parameter:
    """A whole parameter with a gradient; only this rank's shards of both have their values."""
    assert parameter.grad is not None
    own, gradient = local_part(parameter), local_part(parameter.grad)
    whole = nn.Parameter(own.new_empty(parameter.shape), requires_grad=parameter.requires_grad)
    whole.grad = gradient.new_empty(parameter.shape)
    slices = _own_chunk(parameter).slices_in(whole_chunk(parameter.shape))
    whole[slices] = own
    whole.grad[slices] = gradient
    return whole


_AT_ONCE = (
    "`{optimizer}` computes each step from the gradients of all parameters at once, which are in shards here. Use an "
    "optimizer that updates each parameter by itself, such as AdamW, or pass `strategy='ddp'`."
)
_NO_OWNERS = (
    "`{optimizer}` steps whole parameters, and {where} has parameters in shards. Do not shard them; "
    "or pass `strategy='fsdp'`, or a `ModelParallelStrategy` without a pipeline, whose ranks step whole parameters."
)
_TAKEN_OUT = (
    "Parameters of `{optimizer}` were taken out of its groups, or replaced, after `fabric.setup`: the states of others "
    "would no longer be where their owners are. Freeze them, or set up a new optimizer."
)
_NOT_OVER = (
    "The last step of `{optimizer}` raised an error: its owners have changed some parameters, which no other rank has "
    "received. Load a checkpoint, or set up the model and its optimizer anew."
)
_PART = (
    "`{optimizer}.state_dict()`: this rank has only the state of the parameters that it steps. `fabric.save(path, "
    "{{'optimizer': optimizer}})` and `fabric.state_dict(model, optimizer)`, called by every rank, write and return "
    "the state of all parameters."
)


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
    """The states of all parameters, as `of_all_ranks` returns those of each rank. Ranks: all."""
    of_ranks = of_all_ranks(collective, map_only_tensors(flattened, mine))
    whole = {index: each for owned in of_ranks for index, each in owned.items()}
    return dict(sorted(whole.items()))
