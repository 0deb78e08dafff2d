"""Writes to a slice of a sharded parameter arrive in the parameter.

Note [Slices that are copies]: where a DTensor is sharded along the dimension that is sliced, torch 2.13 gathers it and
slices the result, so `weight[2]` and `weight.data[:2]` are copies, and what is written to them is lost. Slices of the
parameters given to `write_through` are of a class that writes to the parameter as well. For this, the operators that
make slices have handlers in the dispatcher of DTensor. Slices that a backward goes through are as torch makes them: it
refuses to write to a view of a parameter that requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fabric.strategies.sharding.dtensor_reads import handlers, read_whole_tensors, run_without
from fabric.strategies.tensors.dtensor import local_part, put_together, shard_like
from fabric.strategies.tensors.nests import written_by

_aten = torch.ops.aten
_OPERATORS: frozenset[Any] = frozenset(
    (
        *(_aten.select.int, _aten.slice.Tensor, _aten.diagonal.default, _aten.unfold.default, _aten.view.default),
        *(_aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default),
    )
)

_DRAWN = (
    "`{operator}` on a slice of a parameter that is sharded (a DTensor): each rank would draw numbers of its own. Draw "
    "before `fabric.setup`, or draw a tensor that is the same on all ranks and copy it: `weight.data[:2].copy_(drawn)`."
)
_TWO_LAYOUTS = (
    "`{operator}` writes to slices of a sharded parameter (a DTensor) and of its transpose at once. Write to one after "
    "the other."
)

_shards: WeakSet[torch.UntypedStorage] = WeakSet()


def write_through(parameters: Iterable[DTensor]) -> None:
    """From now on, what is written to a slice of these parameters is written to the parameter.

    A write gathers the parameter: all ranks that hold shards of it write, as all of them slice.
    """
    read_whole_tensors()
    for parameter in parameters:
        if not parameter.is_meta:
            handlers().update(dict.fromkeys(_OPERATORS, _slice))
            _shards.add(parameter._local_tensor.untyped_storage())


class _View(NamedTuple):
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int | None
    """Which one, where the operator makes several."""

    def of(self, tensor: Tensor) -> Tensor:
        made = self.operator(tensor, *self.args, **self.kwargs)
        return cast(Tensor, made if self.number is None else made[self.number])


@final
class Slice(DTensor):
    """A slice of `base` that torch has made as a copy. `views`: how to make it from the whole of `base`."""

    base: DTensor
    views: tuple[_View, ...]

    @classmethod
    def made(cls, copy: DTensor, base: DTensor, views: tuple[_View, ...]) -> Slice:
        one = cls(copy._local_tensor, copy._spec, requires_grad=False)
        one.base, one.views = base, views
        return one

    def plain(self) -> DTensor:
        return DTensor(self._local_tensor, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if written := [each for each in written_by(operator, args, kwargs) if isinstance(each, Slice)]:
            with torch.no_grad():
                return _write(operator, args, kwargs, written)
        result = operator(*_without_slices(args), **_without_slices(kwargs))
        own = args[0] if args else None
        return _views(result, own, operator, args[1:], kwargs) if isinstance(own, Slice) else result


def _without_slices(nest: Any) -> Any:
    return tree_map_only(Slice, Slice.plain, nest)


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Slice]) -> Any:
    """Run an operator that writes to slices, on whole tensors, and take this rank's shards of the result."""
    if torch.Tag.nondeterministic_seeded in operator.tags:
        raise RuntimeError(_DRAWN.format(operator=operator.name()))
    wholes: dict[torch.UntypedStorage, tuple[DTensor, Tensor]] = {}
    parts: dict[int, Tensor] = {}
    for each in written:
        base, whole = wholes.setdefault(
            each.base._local_tensor.untyped_storage(), (each.base, put_together(each.base).clone())
        )
        if base._spec != each.base._spec:
            raise RuntimeError(_TWO_LAYOUTS.format(operator=operator.name()))
        for view in each.views:
            whole = view.of(whole)
        parts[id(each)] = whole

    def of(tensor: DTensor) -> Tensor:
        part = parts.get(id(tensor))
        return put_together(_without_slices(tensor)) if part is None else part

    operator(*tree_map_only(DTensor, of, args), **tree_map_only(DTensor, of, kwargs))
    for base, whole in wholes.values():
        base._local_tensor.copy_(local_part(shard_like(whole, base)))
    for each in written:
        each._local_tensor.copy_(local_part(shard_like(parts[id(each)], each.plain())))
    if not operator._schema.returns:
        return None
    return written[0] if len(written) == 1 else tuple(written)


def _slice(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of each operator."""
    result = run_without(_slice, operator, args, kwargs)
    base = args[0]
    if not isinstance(base, DTensor) or (base.requires_grad and torch.is_grad_enabled()):
        return result
    local = base._local_tensor
    if type(local) is not Tensor or local.untyped_storage() not in _shards:
        return result
    return _views(result, base, operator, args[1:], kwargs)


def _views(result: Any, of: DTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator has made of a parameter, or of a slice of one, with each copy as a Slice."""
    base, views = (of.base, of.views) if isinstance(of, Slice) else (of, ())

    def made(one: Any, number: int | None) -> Any:
        if not isinstance(one, DTensor):
            return one
        shares_memory = one._local_tensor.untyped_storage() is of._local_tensor.untyped_storage()
        is_view = operator in _OPERATORS or shares_memory
        if is_view != (shares_memory and not views):
            return Slice.made(one, base, (*views, _View(operator, args, kwargs, number)))
        return one

    if isinstance(result, (list, tuple)):
        return type(result)(made(one, number) for number, one in enumerate(result))
    return made(result, None)
