"""Initialisation of a model: created on its device, in its dtype, or without values, which it gets later.

Within `Fabric.init_module(empty_init=True)` parameters get no initial values. They are loaded from a checkpoint, or
initialised by `setup`: on the device by `initialize_empty`, on the meta device by `UninitializedTensors`.

# Note [Who fills the tensors]
A submodule with a `reset_parameters` fills its own tensors, in the order of `model.apply`: children first. Then
`init_weights` of the model is called, if it has one. Then parameters that `init_weights` left alone, and that other
calls initialised when the model was constructed (the last layer by zeros, LoRA's by peft), are initialised by these
calls: see `RecordedInitCalls`. Neither order nor random numbers depend on how the model is sharded: see Note [Whole
draws]. Tensors that none of these fill have a marker value (NaN for floating point), and the first forward raises if it
is still there. So any function may fill them until then (`fabric.load`, torch's `load_state_dict`, the user's own)
without reporting it. Strategies that construct the module on the device write the marker in place of initial values.
Tensors that are still empty at `setup` are then initialised in the same order, by the same
functions (`initialize_empty`).

# Note [Whole draws]
torch fills each shard with random numbers of its own, so weights depend on the sharding, and ranks with one seed give
different shards the same numbers. Here the full tensor is drawn, and then this rank's shard kept. Values that control a
loop (`mask.any()`, `item()`) are those of the full tensor. All other operations (`mul_`, `zero_`, ...) are right on
shards, or `DTensor` raises.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero
from fabric.strategies.precision.precision import Precision, default_dtype
from fabric.strategies.tensors.dtensor import as_sharded, local_part, shard_like, user_class, whole
from fabric.strategies.tensors.parameters import uncompiled

_RESET = ("reset_parameters", "_reset_parameters")
"""The second is the name in torch's `nn.MultiheadAttention` and `nn.Transformer`."""


@contextmanager
def new_tensors(device: torch.device, precision: Precision, *, empty: bool = False) -> Iterator[None]:
    """Within the context, tensors are created on `device` with the precision's parameter dtype.

    `empty`: parameters are not initialised, which saves time if weights are loaded next.
    """
    with default_dtype(precision.param_dtype), device, RecordedInitCalls(skip=True) if empty else nullcontext():
        yield


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments, without the parameter."""

_OVERWRITE = ("constant_", "fill_", "kaiming_uniform_", "normal_", "uniform_", "zero_")
"""The functions of `torch.nn.init` that a mode sees, and the tensor methods that the other functions call."""
_CALL = "_fabric_initialised_by"


def initialised_by(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> nn.Parameter | None:
    """The floating-point parameter that a call initialises from numbers alone; None for any other call."""
    if getattr(function, "__name__", "") not in _OVERWRITE:
        return None
    parameter, *numbers = (*args, *kwargs.values())  # functions of `torch.nn.init` pass it by name, the first one
    is_float = isinstance(parameter, nn.Parameter) and parameter.is_floating_point()
    return None if not is_float or any(isinstance(each, Tensor) for each in numbers) else parameter


@final
class RecordedInitCalls(TorchFunctionMode):
    """Within the context, parameters remember the call that initialises them.

    `skip`: the parameters get NaN in its place. A method that draws is called, for it may be one step of several
    (`trunc_normal_`), and nothing is noted then: the values are there, unless the parameter is on "meta".
    """

    def __init__(self, *, skip: bool = False) -> None:
        super().__init__()
        self._skip = skip

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parameter = initialised_by(function, args, kwargs)
        if parameter is not None:
            vars(parameter)[_CALL] = function, args[1:], {name: kwargs[name] for name in kwargs if name != "tensor"}
            if self._skip and not parameter.is_meta:
                if not args or function.__name__ in ("fill_", "zero_"):
                    return nn.init.constant_(parameter, float("nan"))
                del vars(parameter)[_CALL]
        return function(*args, **kwargs)


def take_calls(tensors: Iterable[Tensor]) -> dict[Tensor, Call | None]:
    """Remove and return the call that was noted for each tensor."""
    return {tensor: vars(tensor).pop(_CALL, None) for tensor in dict.fromkeys(tensors)}


@torch.no_grad()
def repeat_call(tensor: Tensor, call: Call | None, made: Call | None) -> None:
    """Initialise the tensor by `call`, unless `made`, the call that has initialised it, is the same."""
    if call is not None and call != made:
        function, args, kwargs = call
        function(tensor, *args, **kwargs)


def initialize_empty(module: nn.Module) -> None:
    """Initialise the parameters on the device that are still empty, and keep those that were loaded.

    Draws as `reset_parameters` of the submodules does in plain PyTorch, in the order of `model.apply`.
    Raises: RuntimeError: a copy of a submodule has no `reset_parameters`, and no values.
    """
    inner = uncompiled(module)
    own = {part: _own_tensors(part) for part in in_order_of_apply(inner)}
    tensors = [each for named in own.values() for each in named.values() if not each.is_meta]
    calls = take_calls(tensors)
    if not any(calls.values()):
        return
    # Copies of layers (`nn.TransformerEncoder`) have the values of the originals, and no attributes.
    blank = {each for each, call in calls.items() if (call or type(each) is nn.Parameter) and _is_empty(each)}
    with RecordedInitCalls():
        for part in (part for part, named in own.items() if not blank.isdisjoint(named.values())):
            kept = {tensor: tensor.detach().clone() for tensor in own[part].values() if tensor not in blank}
            if any(_call(part, method) for method in _RESET):
                with torch.no_grad():
                    for tensor, values in kept.items():
                        tensor.copy_(values)
        made = take_calls(tensors)
        if all(tensor in blank for tensor, call in calls.items() if call is not None):  # nothing was loaded
            _call(inner, "init_weights")
    for tensor, last in take_calls(tensors).items():
        if tensor in blank and last is None:
            repeat_call(tensor, calls[tensor], made[tensor])
    empty = [name for name, tensor in inner.named_parameters() if tensor in blank and _is_empty(tensor)]
    if empty:
        raise RuntimeError(_NO_VALUES.format(model=type(inner).__name__, names=_have(empty)))


@final
class UninitializedTensors:
    """The tensors of one model that have no initial values yet."""

    def __init__(self, root: nn.Module) -> None:
        self._model = user_class(root).__name__
        self._names = {part: name for name, part in root.named_modules()}
        self._tensors: list[tuple[nn.Module, str]] = []
        # Tied tensors are made once. Weak, because unsharded tensors are to be freed when they are sharded.
        self._made: WeakValueDictionary[Tensor, Tensor] = WeakValueDictionary()
        meta = [tensor for tensor in root.parameters() if tensor.is_meta]
        self._calls = take_calls(meta)
        """The call that initialised each tensor when the module was constructed."""
        # On the meta device, as then: some functions of `torch.nn.init` are not seen there.
        with RecordedInitCalls(), torch.random.fork_rng(devices=()):
            for part in in_order_of_apply(root) if any(self._calls.values()) else ():
                any(_call(part, method) for method in _RESET)
        self._made_again = take_calls(meta)
        """The call by which `reset_parameters` will initialise the tensor."""
        self._places: dict[Tensor, tuple[nn.Module, str]] = {}
        self._was_empty = False

    def fill_all(
        self,
        root: nn.Module,
        device: torch.device,
        collective: Collective,
        *,
        then: Callable[[nn.Module], object] = lambda part: None,
        init_weights: bool = True,
    ) -> None:
        """Initialise the model on its device; plain tensors get the values of rank 0. Ranks: all of `collective`.

        `then`: called with each submodule after it is initialised. `init_weights`: call this method of the model.
        """
        for part in in_order_of_apply(root):
            self._fill(part, device, collective)
            then(part)
        with FullTensorDraws(device, collective):
            if self._was_empty and init_weights:
                with RecordedInitCalls():
                    _call(root, "init_weights")
            for empty, (part, name) in self._places.items():
                tensor = getattr(part, name)
                if take_calls([tensor])[tensor] is None:
                    repeat_call(tensor, self._calls.get(empty), self._made_again.get(empty))
        if self._was_empty and collective.size > 1:
            tensors = (*root.parameters(), *root.buffers())
            broadcast_from_rank_zero(collective, [each for each in tensors if as_sharded(each) is None])

    def _fill(self, part: nn.Module, device: torch.device, collective: Collective) -> None:
        """Allocate the own tensors of one submodule, and call its `reset_parameters`."""
        empty = {name: tensor for name, tensor in _own_tensors(part).items() if tensor.is_meta}
        for name, tensor in empty.items():
            made = self._made.get(tensor)
            if made is None:
                made = self._made[tensor] = _marked(tensor, device)
            setattr(part, name, made)
        if not empty:
            return
        self._was_empty = True
        self._places |= {tensor: (part, name) for name, tensor in empty.items()}
        with FullTensorDraws(device, collective):
            if not any(_call(part, method) for method in _RESET):
                self._tensors += [(part, name) for name in empty]

    def check(self, collective: Collective) -> None:
        """Raise RuntimeError if a tensor is still empty. No cost once all are filled. Ranks: all call it."""
        if not self._tensors:
            return
        mine = [
            f"{self._names[part]}.{name}".lstrip(".") for part, name in self._tensors if _is_empty(getattr(part, name))
        ]
        empty = sorted({name for names in collective.all_gather_object(mine) for name in names})
        if empty:
            raise RuntimeError(_NO_VALUES.format(model=self._model, names=_have(empty)))
        self._tensors.clear()


_NO_VALUES = (
    "`{model}` was made empty, and {names} no values yet. Load a checkpoint (`fabric.load`) before the first forward, "
    "or give the module that has them a `reset_parameters` without arguments, or construct the model without "
    "`empty_init=True`."
)


def _have(names: list[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"


def _own_tensors(part: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a submodule itself."""
    return {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}


def _marked(tensor: Tensor, device: torch.device) -> Tensor:
    marked = torch.full_like(tensor, _mark(tensor.dtype), device=device)
    if not isinstance(tensor, nn.Parameter):
        return marked
    parameter = nn.Parameter(marked, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))  # attributes that the user has set on it
    return parameter


def _mark(dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_empty(tensor: Tensor) -> bool:
    """Whether this rank's part has only the marker, and zeros, which the padding row of an embedding has. False for
    booleans, which have no spare value."""
    values = local_part(tensor.detach())
    if values.dtype == torch.bool:
        return False
    mark = _mark(values.dtype)
    marked = values.isnan() if mark != mark else values == mark
    return bool(marked.any()) and bool((marked | (values == 0)).all())


def _call(part: nn.Module, method: str) -> bool:
    """Call a method of a submodule. Returns False if it has none that needs no arguments."""
    function = getattr(part, method, None)
    # The class must have it, too: peft's models look up missing names in the model that they wrap.
    if not callable(function) or not callable(getattr(type(part), method, None)):
        return False
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
        return False
    function()
    return True


def in_order_of_apply(root: nn.Module) -> list[nn.Module]:
    """The modules of a model, each once, children before parents: the order of `nn.Module.apply`."""
    return list(dict.fromkeys([*chain.from_iterable(map(in_order_of_apply, root.children())), root]))


_ops = torch.ops.aten
_DECISIONS = (_ops.any.default, _ops.all.default, _ops._local_scalar_dense.default)


@final
class FullTensorDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context: random operations on a sharded tensor draw the numbers of the full tensor, on rank 0.

    Ranks: all of `collective`, the same operations in the same order.
    """

    def __init__(self, device: torch.device, collective: Collective) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._collective = device, collective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sharded = as_sharded(args[0]) if args else None
        if sharded is None:
            return func(*args, **kwargs)
        if func in _DECISIONS:
            return func(whole(sharded), *args[1:], **kwargs)
        empty = partial(torch.empty, dtype=sharded.dtype, device=self._device)
        if func is _ops.new_empty.default:  # for `orthogonal_`: with the full size
            return func(empty(()), *args[1:], **kwargs)
        if func is _ops.copy_.default and as_sharded(args[1]) is None:
            return self._give(sharded, args[1].to(sharded.dtype).expand(sharded.shape).contiguous())
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = func(empty(sharded.shape), *args[1:], **kwargs)
            return self._give(sharded if func._schema.is_mutable else torch.empty_like(sharded), drawn)
        return func(*args, **kwargs)

    def _give(self, sharded: Tensor, values: Tensor) -> Tensor:
        if self._collective.size > 1:
            broadcast_from_rank_zero(self._collective, [values])
        local_part(sharded).copy_(local_part(shard_like(values, sharded)))
        return sharded
