"""What a rank holds of a model under FairScale's FullyShardedDataParallel: shards of parameters, gradients and states.

A shard is one-dimensional, and equally long on every rank: the last shards are padded with zeros. FairScale stores the
unsharded shape on the parameter, as `_orig_size`. With the hooks of this file `state_dict()` of a module and of its
submodules returns unsharded tensors, copied to the CPU, on every rank. `load_state_dict` of optimizers takes unsharded
tensors, and so does `load_state_dict` of modules where fabric calls it. Ranks: all call `state_dict()`; each loads by
itself. A checkpoint is written from the shards, by `SlicedState`.

Between backward and step, gradients are `GradientShard`s: a norm, a comparison or a copy of a gradient raises, because
it would be that of the shard. An operation that changes each element in place is right: `parameter.grad.mul_(0.5)`.
Backward and the steps of prepared optimizers have plain tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.strategies.checkpoint.direct_state_dict import RefuseWhole
from fabric.strategies.checkpoint.state import PLAIN, KeepsNamesAndShapes, StateAccess, by_saved_index, map_state
from fabric.strategies.checkpoint.tensors import TensorShards, flat_shard, in_memory
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.optimizers.owners import held_state, refuse_part
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.nests import map_only_tensors
from fabric.strategies.tensors.parameters import parameters_of
from fabric.strategies.undo import undo_all

_NUMBERS = ("step", "mu_product", "mu", "eta")
"""State of torch's optimizers that is a scalar for every shape of the parameter."""
_Entry: TypeAlias = Callable[[Tensor, torch.Size], Any]
"""Makes the entry of a tensor in a state, from this rank's shard and the unsharded shape."""


def slice_of(whole: Tensor, collective: Collective) -> Tensor:
    """This rank's shard, as a copy."""
    flat, rank = whole.detach().reshape(-1), collective.rank
    length = -(-flat.numel() // collective.size)
    own = flat.new_zeros(length)
    part = flat[rank * length : (rank + 1) * length]
    own[: part.numel()] = part
    return own


def whole_of(collective: Collective, own: Tensor, shape: torch.Size) -> Tensor:
    """All-gather the unsharded tensor. Ranks: all call it."""
    return collective.all_gather(own.detach()).view(-1)[: shape.numel()].view(shape)


def attach_module(collective: Collective, module: nn.Module) -> Callable[[], None]:
    """Make `state_dict` and `load_state_dict` of a module use unsharded tensors. Returns a function that undoes it."""
    handles: list[RemovableHandle] = []
    for part in module.modules():
        gather, cut = ModuleHook(_gather, collective), ModuleHook(_slice, collective)
        handles.append(part.register_state_dict_post_hook(gather))  # type: ignore[no-untyped-call]
        handles.append(part.register_load_state_dict_pre_hook(RefuseWhole()))  # type: ignore[no-untyped-call]
        handles.append(part.register_load_state_dict_pre_hook(cut))  # type: ignore[no-untyped-call]
    last = ModuleHook(_gather_renamed, collective)
    handles.append(module.register_state_dict_post_hook(last))  # type: ignore[no-untyped-call]
    return undo_all(handle.remove for handle in handles)


def attach_optimizer(
    collective: Collective, optimizer: Optimizer, owned: Callable[[Optimizer], list[Any]]
) -> Callable[[], None]:
    """Shard the state of an optimizer, and make its `load_state_dict` take unsharded tensors.

    `owned` returns the parameters, or raises, before each step. Returns a function that undoes it.
    """

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = owned(optimizer)
        reveal(parameters)
        for parameter in parameters:
            parameter.is_stepping = True  # read by a backward in the closure of the step

    def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters: list[Any] = parameters_of(optimizer)
        for parameter in parameters:
            parameter.is_stepping = False
        conceal(parameters)

    for parameter, entries in optimizer.state.items():
        entries.update({name: _sliced_entry(name, value, parameter, collective) for name, value in entries.items()})
    return undo_all(
        (
            hook_steps(optimizer, before_step, after_step),
            optimizer.register_state_dict_pre_hook(refuse_part).remove,
            optimizer.register_load_state_dict_pre_hook(partial(_cut_state, collective)).remove,
        )
    )


def _cut_state(collective: Collective, optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    """A state with this rank's shards in place of whole tensors. Shards stay as they are."""
    by_index = by_saved_index(optimizer, content)
    known = {index: entries for index, entries in content["state"].items() if index in by_index}
    return map_state(
        {**content, "state": known}, lambda index, name, value: _sliced_entry(name, value, by_index[index], collective)
    )


def _is_sliced(name: str, value: Any, parameter: Any) -> bool:
    return isinstance(value, Tensor) and name not in _NUMBERS and value.shape == parameter.shape


def _sliced_entry(name: str, value: Any, parameter: Any, collective: Collective) -> Any:
    value = in_memory(value, mapped=True)
    if not isinstance(value, Tensor):
        return value
    if name not in _NUMBERS and value.shape == parameter._orig_size:
        return slice_of(value, collective)
    return value if _is_sliced(name, value, parameter) else value.clone()  # it may be mapped from a file


@final
class ModuleHook(KeepsNamesAndShapes):
    """A hook on a sharded module. A copy of the module raises: its shards would never be gathered."""

    def __init__(self, function: Callable[..., None], *first: Any) -> None:
        self._function, self._first = function, first

    def __call__(self, *args: Any) -> None:
        self._function(*self._first, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(IN_SLICES)


IN_SLICES = (
    "A module under `strategy='ddp_fully_sharded'` cannot be copied or pickled: each rank has shards of its "
    "parameters. Copy it before `fabric.setup`, or load `module.state_dict()`, which is unsharded, into another."
)


def _gather(collective: Collective, part: nn.Module, content: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace shards, but not the parameters themselves, which `state_dict(keep_vars=True)` returns."""
    for name, parameter in _own_parameters(part):
        if prefix + name in content and content[prefix + name] is not parameter:
            content[prefix + name] = whole_of(collective, parameter, parameter._orig_size).to("cpu", copy=True)


def _gather_renamed(collective: Collective, module: nn.Module, content: dict[str, Any], prefix: str, _: Any) -> None:
    """Gather shards that the user's hooks have renamed before `_gather` ran."""
    shards: dict[int, Any] = {each.data_ptr(): each for each in module.parameters() if _is_shard(each) and each.numel()}
    for name, value in content.items():
        if type(value) is Tensor and (own := shards.get(value.data_ptr())) is not None:
            content[name] = whole_of(collective, own, own._orig_size).to("cpu", copy=True)


def _slice(collective: Collective, part: nn.Module, content: dict[str, Any], prefix: str, *others: Any) -> None:
    errors: list[str] = others[-1]
    for name, parameter in _own_parameters(part):
        whole, shape = in_memory(content.get(prefix + name), mapped=True), parameter._orig_size
        if not isinstance(whole, Tensor):
            continue
        if whole.shape == shape:
            content[prefix + name] = slice_of(whole, collective)
        else:
            content[prefix + name] = parameter  # so that torch's errors do not name shapes of shards
            errors.append(f"{prefix + name!r} is {tuple(whole.shape)} in the state, and {tuple(shape)} in the module.")


def _own_parameters(part: nn.Module) -> list[tuple[str, Any]]:
    """The sharded parameters of a submodule. Within `fabric.gathered` its parameters are whole, and left out."""
    return [(name, each) for name, each in part._parameters.items() if each is not None and _is_shard(each)]


def _is_shard(parameter: Tensor) -> bool:
    return "_orig_size" in vars(parameter)


@final
class SlicedState(StateAccess):
    """The shards of each rank."""

    hooks_read_parameters = True

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def gather(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        copies = []
        for parameter in parameters:
            own = parameter.data
            parameter.data = whole_of(self._collective, own, cast(Any, parameter)._orig_size)
            copies.append(parameter.clone())  # while it is whole: FairScale's backward expects a whole gradient
            parameter.data = own
        return copies

    def gradients(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield name, whole_of(self._collective, plain_of(parameter.grad), cast(Any, parameter)._orig_size)

    def scatter(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(slice_of(value, self._collective))

    def kept(self, parameter: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor] | None:
        known: Any = parameter
        is_whole = _is_shard(parameter) and parameter.data_ptr() != known._fp32_shard.data_ptr()
        return (slice_of(parameter, self._collective), known._fp32_shard.to(parameter.dtype)) if is_whole else None

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        return self._module_state(module, self._shards)

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        PLAIN.write_module(module, content, strict=strict)

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        parameters: list[Any] = parameters_of(optimizer)

        def own(index: Any, name: str, value: Any) -> Any:
            parameter = parameters[index]
            return self._shards(value, parameter._orig_size) if _is_sliced(name, value, parameter) else value

        return map_state(held_state(optimizer), own)

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        # As shards: an optimizer that overrides `load_state_dict` may read its argument again after calling torch's.
        PLAIN.write_optimizer(optimizer, _cut_state(self._collective, optimizer, content))

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        self.write_optimizer(optimizer, {**in_memory({**content, "state": {}}), "state": content["state"]})

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...] | None]:
        state = self._module_state(module, lambda own, shape: torch.empty(shape, device="meta"))
        return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in state.items()}

    def _module_state(self, module: nn.Module, entry: _Entry) -> dict[str, Any]:
        """The state of a module with an entry for each parameter. All names of a tied parameter share one entry."""
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        made: dict[Tensor, Any] = {}
        for name, value in state.items():
            if isinstance(value, nn.Parameter):
                if value not in made:
                    made[value] = entry(value, cast(Any, value)._orig_size)
                state[name] = made[value]
        return state

    def _shards(self, own: Tensor, shape: torch.Size) -> TensorShards:
        return flat_shard(shape, self._collective.rank * own.numel(), own.detach(), self._collective.rank)


@final
class GradientShard(Tensor):
    """This rank's shard of an averaged gradient. Shares the memory of `plain`."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> "GradientShard":
        made: GradientShard = Tensor._make_subclass(cls, plain)
        made.plain = plain
        return made

    def local_part(self) -> Tensor:
        """The shard as a plain tensor."""
        return self.plain

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation that changes each element in place; raise RuntimeError for any other."""
        name = operator.overloadpacket.__name__
        of_many = name.startswith("_foreach_")
        if not name.endswith("_") or not (of_many or name in _BY_ELEMENT or torch.Tag.pointwise in operator.tags):
            raise RuntimeError(_WHOLE.format(operator=operator))
        operator(*map_only_tensors(plain_of, args), **map_only_tensors(plain_of, dict(kwargs or {})))
        return None if of_many else args[0]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<this rank's shard of a gradient, {self.numel()} elements>"


def conceal(parameters: Iterable[Any]) -> None:
    """Give out averaged gradients as `GradientShard`s, except within the step of their optimizer."""
    for parameter in parameters:
        if type(parameter.grad) is Tensor and not vars(parameter).get("is_stepping"):
            parameter.grad = GradientShard(parameter.grad)


def reveal(parameters: Iterable[Any]) -> None:
    """Undo `conceal`."""
    for parameter in parameters:
        if isinstance(parameter.grad, GradientShard):
            parameter.grad = parameter.grad.plain


def plain_of(tensor: Tensor) -> Tensor:
    """A gradient, or any other value, as a plain tensor."""
    return tensor.plain if isinstance(tensor, GradientShard) else tensor


def holds_local(parameter: Any) -> bool:
    """Whether the gradient is unsharded and not averaged. Its shape may not tell: `(1,)` may be a shard's shape."""
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, GradientShard) or vars(parameter).get("is_stepping"):
        return False
    is_whole: bool = gradient.shape == getattr(parameter, "_orig_size", None)
    return is_whole


_BY_ELEMENT = frozenset(("zero_", "fill_", "copy_", "masked_fill_"))
"""Operations that act on each element, without torch's tag `pointwise`."""
_WHOLE = (
    "`{operator}` of a gradient under `strategy='ddp_fully_sharded'`: each rank has a shard of each gradient, and the "
    "result would be that of the shard. For the norm, or to clip, call `fabric.clip_gradients(model, optimizer, "
    "max_norm=...)`, with `float('inf')` for the norm alone; change each element in place, as "
    "`parameter.grad.mul_(0.5)` does; set the optimizer up; or pass `strategy='fsdp'`."
)
