"""Parameters and gradients that are flat shards: what would read a shard as if it were the whole tensor raises.

A strategy that keeps parameters as flat, padded shards, and the user's own parameter objects, can only hand out shards
between forwards. What acts on each element has the same result on a shard: optimizers, `parameter.mul_(0.5)`, a moving
average. A norm, a sum, a comparison as a bool, or a copy to NumPy has not: it would be that of this rank's part,
silently.

# Note [Classes of shards]
`show` gives parameters the class `ShardedParameter`, and `hide` their own; no tensor is made, and the objects, their
memory and their hashes remain, so optimizers and the user's references stay valid. While they are shown, what is
computed from them, and their gradients, are `FlatShard`s, which pass on: so `(parameter.grad ** 2).sum()` raises as
`parameter.grad.sum()` does. Within forward, backward and the steps of prepared optimizers they are hidden: these see
plain parameters, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.strategies.tensors.nests import tensors_in, written_by
from fabric.strategies.torch_internals import disabled_torch_function_impl, without_torch_function


@final
class FlatShard(Tensor):
    """This rank's shard of a parameter or gradient, or what was computed from shards element by element.

    Shares the memory of `plain`. `whole`: the unsharded shape. `why`: how the error of other operations goes on.
    """

    plain: Tensor
    whole: torch.Size
    why: str

    @staticmethod
    def __new__(cls, plain: Tensor, whole: torch.Size, why: str) -> FlatShard:
        made: FlatShard = Tensor._make_subclass(cls, plain)
        made.plain, made.whole, made.why = plain, whole, why
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what copies the values elsewhere; the rest comes to `__torch_dispatch__`."""
        name = getattr(function, "__name__", "")
        if name in _COPIES_OUT:
            _refuse(name, _whys(args))
        if function in _COUNT_DIMENSIONS:
            return len(args[0].whole)
        return disabled_torch_function_impl(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _by_element(operator, args, kwargs or {})

    def local_part(self) -> Tensor:
        """A plain tensor with its memory: see `tensors/dtensor.py`."""
        return self.plain

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        made: FlatShard = memo.setdefault(id(self), FlatShard(self.plain.detach().clone(), self.whole, self.why))
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickle", self.why)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<this rank's shard of a tensor of shape {tuple(self.whole)}>"


class ShardedParameter(nn.Parameter):
    """A parameter while it is this rank's shard. See Note [Classes of shards]."""

    _sharding: tuple[torch.Size, str]
    """The unsharded shape, and how the error goes on."""
    _shown: Any
    """A weak reference to what was returned for its gradient."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function == _GET_GRADIENT:
            return _gradient_of(args[0])
        if function in _COUNT_DIMENSIONS:
            return len(args[0]._sharding[0])
        name = getattr(function, "__name__", "")
        if name in _COPIES_OUT:
            _refuse(name, _whys(args))
        with without_torch_function():
            if function == _SET_GRADIENT and isinstance(args[1], Tensor):
                parameter, gradient = args[0], _plain_below(args[1])
                if gradient.shape != parameter.shape:
                    _refuse(f"grad = a tensor of shape {tuple(gradient.shape)}", parameter._sharding[1])
                return function(parameter, gradient)
            if name in _LEFT_ALONE:
                return function(*args, **kwargs)
            with _ByElement():  # type: ignore[no-untyped-call]
                found = function(*args, **kwargs)
            if type(found) is Tensor and function == _GET_DATA:
                return FlatShard(found, *args[0]._sharding)
            return found

    def local_part(self) -> Tensor:
        """A plain tensor with its memory: see `tensors/dtensor.py`."""
        return _plain(self)

    def __hash__(self) -> int:
        return id(self)  # as that of a tensor, which calls `__torch_function__`

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        shard: Any = self
        made: FlatShard = memo.setdefault(id(self), FlatShard(_plain(self).clone(), *shard._sharding))
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickle", _whys([self]))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<this rank's shard of a parameter of shape {tuple(_whole_of(self))}>"


def show(parameters: Iterable[Any], why: str, whole: Callable[[Any], torch.Size]) -> None:
    """From here on these parameters are known as shards. `whole`: returns the unsharded shape of one.

    A parameter of a class of its own is left as it is.
    """
    for parameter in parameters:
        if type(parameter) is _PLAIN:
            parameter._sharding = whole(parameter), why
            parameter.__class__ = ShardedParameter


def hide(parameters: Iterable[Any]) -> list[Any]:
    """From here on these are plain parameters. Returns those that were shown, for `show_again`."""
    shown = [each for each in parameters if type(each) is _SHOWN]
    for parameter in shown:
        parameter.__class__ = _PLAIN
    return shown


def forget(parameters: Iterable[Any]) -> None:
    """Undo `show`."""
    hide(parameters)
    for parameter in parameters:
        vars(parameter).pop("_sharding", None)
        vars(parameter).pop("_shown", None)


def show_again(parameters: Iterable[Any]) -> None:
    """Undo `hide`."""
    for parameter in parameters:
        parameter.__class__ = ShardedParameter


def plain_shard(tensor: Tensor) -> Tensor:
    """The tensor itself if it is not known as a shard; otherwise a plain tensor with its memory and version."""
    return _plain(tensor) if isinstance(tensor, (FlatShard, ShardedParameter)) else tensor


def _plain(tensor: Any) -> Tensor:
    if isinstance(tensor, FlatShard):
        return tensor.plain
    with without_torch_function():
        found: Tensor = tensor.detach()
    return found


def _gradient_of(parameter: Any) -> Tensor | None:
    """The gradient, as a shard if it is one: between backwards it may be this rank's own, of the unsharded shape."""
    with without_torch_function():
        gradient: Tensor | None = parameter.grad
        if gradient is None or isinstance(gradient, FlatShard) or getattr(parameter, "_is_local", False):
            return gradient
        if gradient.shape != parameter.shape:
            return gradient
    known = vars(parameter).get("_shown")
    shown = None if known is None else known()
    if shown is None or shown.plain is not gradient:
        shown = FlatShard(gradient, *parameter._sharding)
        parameter._shown = ref(shown)
    return shown


class _ByElement(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, operations on parameters that are shards act on each element, or raise."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _by_element(operator, args, kwargs or {})


def _by_element(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on plain tensors. Raises RuntimeError if its result on a shard is not a shard of its result."""
    tensors = tensors_in((args, kwargs))
    shards = [each for each in tensors if isinstance(each, (FlatShard, ShardedParameter))]
    if not shards:
        return operator(*args, **kwargs)
    name = operator.overloadpacket.__name__
    written = written_by(operator, args, kwargs)
    if name.startswith("_amp_"):
        _refuse(f"GradScaler, {operator}", _GRAD_SCALER)
    of_many = name.startswith(("_foreach_", "_fused_"))
    if name in _REDUCES or not (of_many or name in _KEEPS or torch.Tag.pointwise in operator.tags):
        _refuse(str(operator), _whys(shards))
    if torch.Tag.nondeterministic_seeded in operator.tags:
        _refuse(str(operator), _whys(shards))
    if not of_many and not _fit(tensors, shards):
        _refuse(f"{operator} with tensors of other shapes", _whys(shards))
    if any(isinstance(each, Tensor) and not isinstance(each, (FlatShard, ShardedParameter)) for each in written):
        _refuse(f"{operator} into a plain tensor", _whys(shards))
    plain = {id(_plain_below(each)): each for each in tensors}
    result = operator(*_lowered(args), **_lowered(dict(kwargs)))
    if isinstance(result, Tensor):
        if result.shape != shards[0].shape:
            _refuse(str(operator), _whys(shards))
        return plain[id(result)] if id(result) in plain else _like(result, shards[0])
    if isinstance(result, (list, tuple)):
        like = shards if len(shards) >= len(result) else shards * len(result)
        return type(result)(
            plain[id(each)] if id(each) in plain else _like(each, of) for each, of in zip(result, like, strict=False)
        )
    if result is not None:
        _refuse(str(operator), _whys(shards))
    return None


def _whole_of(shard: Any) -> torch.Size:
    whole: torch.Size = shard.whole if isinstance(shard, FlatShard) else shard._sharding[0]
    return whole


def _like(result: Tensor, shard: Any) -> FlatShard:
    return FlatShard(result, _whole_of(shard), _whys([shard]))


def _fit(tensors: Sequence[Tensor], shards: Sequence[Any]) -> bool:
    """Whether the shards are of tensors of one shape, and the rest are shards without that class, or single numbers."""
    shape, whole = shards[0].shape, _whole_of(shards[0])
    return all(
        _whole_of(each) == whole and each.shape == shape
        if isinstance(each, (FlatShard, ShardedParameter))
        else each.shape == shape or each.numel() == 1
        for each in tensors
    )


def _plain_below(tensor: Any) -> Any:
    return tensor.plain if isinstance(tensor, FlatShard) else tensor


def _lowered(nest: Any) -> Any:
    if isinstance(nest, (list, tuple)):
        return type(nest)(map(_lowered, nest))
    if isinstance(nest, dict):
        return {name: _lowered(value) for name, value in nest.items()}
    return _plain_below(nest)


def _whys(args: Iterable[Any]) -> str:
    for each in tensors_in(tuple(args)):
        if isinstance(each, FlatShard):
            return each.why
        if isinstance(each, ShardedParameter):
            return each._sharding[1]
    return ""


def _refuse(operation: str, why: str) -> NoReturn:
    raise RuntimeError(f"`{operation}` of this rank's shard {why}")


_GRAD_SCALER = (
    "of a gradient: ranks would skip a step where their own part overflows, and the others would not. Pass "
    "`precision='16-mixed'`, whose scaler asks all ranks, and leave out `torch.amp.GradScaler`."
)
_COPIES_OUT = frozenset(
    (
        *("numpy", "tolist", "item", "__array__", "__dlpack__", "__format__", "__iter__", "__contains__"),
        *("__bool__", "__float__", "__int__", "__complex__", "__index__"),
    )
)
_LEFT_ALONE = frozenset(("__set__", "__delete__", "requires_grad_", "register_hook"))
_KEEPS = frozenset(
    (
        *("clone", "detach", "detach_", "alias", "copy_", "_to_copy", "lift_fresh", "zero_", "fill_", "fill"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "view", "_unsafe_view", "_reshape_alias"),
        *("masked_fill", "masked_fill_"),
    )
)
"""Operations that act on each element, and are not tagged so."""
_REDUCES = frozenset(("_foreach_norm", "_foreach_max", "_foreach_powsum"))
_PLAIN: Any = nn.Parameter
_SHOWN: Any = ShardedParameter
_ATTRIBUTES: Any = Tensor
_GET_GRADIENT, _SET_GRADIENT, _GET_DATA = (
    _ATTRIBUTES.grad.__get__,
    _ATTRIBUTES.grad.__set__,
    _ATTRIBUTES.data.__get__,
)
_COUNT_DIMENSIONS = (_ATTRIBUTES.ndim.__get__, _ATTRIBUTES.dim, _ATTRIBUTES.ndimension)
"""Programs choose parameters by these (weight decay for matrices): they are those of the whole tensor."""
