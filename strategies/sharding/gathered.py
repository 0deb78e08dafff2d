"""State that `fully_shard` keeps besides the shards: gathered parameters after forward, and unreduced gradients.

# Note [Gathered after forward]
The root's parameters stay gathered after forward, because backward needs them first. Until then `parameters()` returns
the gathered copies, while optimizers hold the shards. With `fully_shard` alone (torch 2.13)
- `model.zero_grad()` and `parameter.grad = None` between forward and backward do not clear the gradients of the shards:
  here they do. Meanwhile a copy whose shard has a gradient has a placeholder for it, which computing with raises;
- after backward, forward, step, another forward uses the weights from before the step: here they are gathered
  again if a shard has changed;
- after an evaluation `parameters()` returns copies, and writing to them changes nothing: here a forward without
  gradients frees what it gathered.

# Note [torch.autograd.grad of gathered copies]
`torch.autograd.grad(loss, parameters)` between forward and backward computes gradients of gathered copies, and then
`fully_shard` frees these, as after a backward: to read one afterwards is a segmentation fault (torch 2.13). Here they
are kept until the next backward or forward. What the program writes to a copy, or to its `grad`, changes no shard: the
next forward raises. So do second derivatives, for which `fully_shard` has freed the copies too early.

# Note [Gradients not reduced yet]
Within `no_backward_sync` gradients accumulate on the gathered copies, where `zero_grad` does not reach them. So a shard
without a gradient gets one of zeros meanwhile; if that is replaced or written to, the accumulated gradients are
discarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from fabric.strategies.gradients.in_shards import InShards
from fabric.strategies.module.copies import Hook
from fabric.strategies.module.forward import leave_uncompiled
from fabric.strategies.module.outputs import conceal, expose, outputs_in
from fabric.strategies.module.parameter_rebinding import HOOKED
from fabric.strategies.module.transforms import refuse_transforms
from fabric.strategies.sharding.changed_in_forward import CHANGED, Calls, differ
from fabric.strategies.sharding.dtensor import as_sharded, own_part, user_class
from fabric.strategies.sharding.other_data import OTHER_DATA, Storages
from fabric.strategies.sharding.slices import write_through
from fabric.strategies.torch_internals import (
    current_graph_task_id,
    disable_dynamo,
    is_result_of_grad,
    node_of,
    require_fully_shard,
)
from fabric.strategies.undo import replace_attributes, undo_all

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_Unit: TypeAlias = "tuple[FSDPModule, list[Any]]"
"""A module that `fully_shard` was called on, and its parameter groups."""


@final
class Gathered:
    """The gathered copies and unreduced gradients of one model. `units`: the modules that `fully_shard` was called on.

    Hooks on `module` surround its forward, `around` surrounds another method; of nested calls only the outermost
    counts.
    """

    def __init__(self, module: nn.Module, units: Sequence[FSDPModule]) -> None:
        if units:
            require_fully_shard()
        self._units = [(unit, groups) for unit in units if (groups := _groups(unit))]
        self._depth = 0
        self._calls = Calls()
        self._gathered: list[_Unit] = []
        self._versions: list[tuple[int, int]] = []
        self._unreduced: list[tuple[Any, Tensor, int]] = []
        self._shown: list[tuple[Any, Tensor, int]] = []
        self._first_use: RemovableHandle | None = None
        self._is_watching = False
        self._send_zeros: list[Callable[[bool], None]] = []
        self._hooked: dict[int, Tensor] = {}
        self._held: list[tuple[_Unit, list[bool], list[int]]] = []
        self._restore = undo_all(())
        self._hooks: list[Any] = []
        self._module = module
        self._places_of = {cast(nn.Module, unit[0]): _places(_params([unit])) for unit in self._units}
        self._places = [place for places in self._places_of.values() for place in places]
        self._storages = Storages()
        self._refuse_other_data()
        write_through(each.sharded_param for each in self.params())
        self._is_read = module in cast("Sequence[nn.Module]", units)
        if not self._units:
            return
        # Around the hooks of `fully_shard`, which are on the module already.
        enter, leave = Hook(lambda *_: self._enter()), Hook(lambda module, args, output: self._leave(output))
        self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))
        renew = Hook(lambda unit, _: self._renew(unit))
        check = Hook(lambda unit, args, output: self.leave_unit(unit))
        for unit in cast("Sequence[nn.Module]", units):
            self._hooks.append(unit.register_forward_hook(check, prepend=True))  # before `fully_shard` frees the copies
            if unit is not module:
                self._hooks.append(unit.register_forward_pre_hook(renew, prepend=True))
        self._restore = undo_all(
            (
                *(replace_attributes(part, zero_grad=_ZeroGrad(self, part)) for part in module.modules()),
                *(_expose_outputs(unit) for unit in cast("Sequence[nn.Module]", units)),
            )
        )

    def params(self) -> Iterator[Any]:
        """Each parameter, as torch's FSDPParam."""
        return _params(self._units)

    def send_zeros_for_unused(self) -> bool:
        """Make each unit reduce gradients of all of its parameters in a backward that is watched: in others, such as
        `torch.autograd.grad` of inputs, none are computed. False: this torch cannot."""
        for unit, _ in self._units:
            enable: Callable[..., None] | None = getattr(unit, "set_reduce_scatter_unused_params", None)  # torch 2.13
            if enable is None:
                return False
            self._send_zeros.append(functools.partial(enable, recurse=False))
        return True

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which gathers by itself, as another entry point of the model."""

        @functools.wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            output = None
            self._enter()
            try:
                output = conceal(function(*args, **kwargs))
            finally:
                self._leave(output)
            return output

        leave_uncompiled(entered)
        return entered if self._units else function

    def refuse_bypassed(self, function: Callable[..., Any]) -> None:
        """Raise RuntimeError if `forward` was called as a method: the hooks that gather are those of a call."""
        is_method = getattr(function, "__self__", None) is self._module  # others gather by themselves
        if is_method and self._units and not self._depth and current_graph_task_id() == -1:
            raise RuntimeError(
                _BYPASSED.format(model=user_class(self._module).__name__, name=getattr(function, "__name__", "forward"))
            )

    def leave_unit(self, unit: nn.Module) -> None:
        """Call this before the copies of a unit are freed after its forward. See `changed_in_forward`."""
        if self._calls.is_checked and current_graph_task_id() == -1:  # not recomputed in backward
            self._refuse_changed(unit)

    @disable_dynamo
    def _refuse_changed(self, unit: nn.Module) -> None:
        """Raise RuntimeError if a gathered copy has other values than its shard."""
        changed = [
            (part, name)
            for part, own, name, each in self._places_of.get(unit, ())
            if own.get(name) is vars(each).get("_unsharded_param")
            and differ(own_part(each._unsharded_param, each.sharded_param), each.sharded_param._local_tensor)
        ]
        self._refuse(CHANGED, changed)

    def watch(self) -> Callable[[], None] | None:
        """See `GradientSync.watch`."""
        if not self._units:
            return None
        self._take()
        self._drop_discarded()
        self._watched(True)
        self._let_go()
        return functools.partial(self._find_unreduced, [(each, unreduced(each[0])) for each in self._unreduced])

    def zero_grad(self, part: nn.Module, *, set_to_none: bool) -> None:
        """Clear the gradients of shards whose gathered copies `part` has now."""
        kept = self._kept()
        visible = set(part.parameters()) if kept else set()
        for each in _params(kept):
            if each.unsharded_param in visible:
                _clear(each.sharded_param, set_to_none=set_to_none)

    def release(self) -> None:
        """Remove our hooks and placeholders."""
        self._take()
        self._let_go()
        for hook in self._hooks:
            hook.remove()
        self._restore()

    @disable_dynamo
    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        refuse_transforms(self._module)
        self._refuse_replaced()
        self._refuse_other_data()
        self._refuse_hooks()
        self._calls.next()
        self._is_read = True
        if self._is_watching:  # a backward that raised leaves it
            self._watched(False)
        self._take()
        self._drop_discarded()
        self._refuse_written()
        kept = self._kept()
        if kept and _versions(kept) != self._versions:
            for unit, _ in kept:
                unit.reshard()
            kept = []
        self._gathered = kept

    @disable_dynamo
    def _renew(self, unit: nn.Module) -> None:
        """A unit is called directly: gather it again, because its shards may have changed."""
        if self._depth == 0 and current_graph_task_id() == -1:
            cast("FSDPModule", unit).reshard()

    @disable_dynamo
    def _leave(self, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        kept = self._kept()
        if not torch.is_grad_enabled() or (isinstance(output, Tensor) and not output.requires_grad):
            for each in kept:
                if each not in self._gathered:  # the others wait for the backward of an earlier forward
                    each[0].reshard()
        else:
            self._versions = _versions(kept)
            self._show(kept, output)
            self._hook(kept)

    def _refuse_replaced(self) -> None:
        """Raise RuntimeError if a parameter was replaced: `fully_shard` puts its own back before it runs.

        A parameter in shards may replace another before torch reads them: in the first forward, or see `take_as_root`.
        """
        lost = [
            (part, name)
            for part, own, name, each in self._places
            if (now := own.get(name)) is not each.sharded_param
            and (now is None or now is not vars(each).get("_unsharded_param"))
            and (self._is_read or as_sharded(now) is None)
        ]
        if lost:
            present = set(self._module.modules())
            self._refuse(_REPLACED, [place for place in lost if place[0] in present])

    def _refuse_other_data(self) -> None:
        """Raise RuntimeError after `parameter.data = other`."""
        moved = [(part, name) for part, _, name, each in self._places if self._storages.is_other(each.sharded_param)]
        self._refuse(OTHER_DATA, moved)

    def _refuse_hooks(self) -> None:
        """Raise RuntimeError for a hook on a shard: backward computes gradients of the gathered parameters."""
        hooked = [(part, name) for part, _, name, each in self._places if each.sharded_param._backward_hooks]
        self._refuse(HOOKED, hooked)

    def _refuse(self, sentence: str, lost: Sequence[tuple[nn.Module, str]]) -> None:
        """Raise RuntimeError that names these parameters, each given by its module and its name there, if any."""
        if lost:
            prefixes = {part: f"{prefix}." if prefix else "" for prefix, part in self._module.named_modules()}
            some = ", ".join(repr(f"{prefixes.get(part, '')}{name}") for part, name in lost[:5])
            raise RuntimeError(sentence.format(model=user_class(self._module).__name__, names=some))

    def _show(self, kept: list[_Unit], output: Any) -> None:
        """Give gathered copies a gradient that is zeroed for that of their shard, until it is taken back."""
        for each in _params(kept):
            copy = each.unsharded_param
            if each.sharded_param.grad is not None:
                if copy.grad is None:
                    copy.grad = InShards(copy, _READ)
                self._shown.append((each, copy.grad, copy.grad._version))
        copies = [each.unsharded_param for each, _, _ in self._shown if each.unsharded_param.requires_grad]
        if copies:  # a backward that is not ours takes them when it computes the first of these gradients
            self._first_use = register_multi_grad_hook(copies, lambda _: self._take(), mode="any")
        if self._shown:  # and `torch.autograd.grad` of inputs, which computes none of these, but ends as a backward
            for tensor in outputs_in(output):
                tensor.register_hook(lambda _: self._take())  # type: ignore[no-untyped-call]

    def _take(self) -> None:
        """Take the placeholders back, and clear the gradients of shards whose copies' gradients were cleared."""
        if not self._shown:
            return
        if self._first_use is not None:
            self._first_use.remove()
        shown, self._shown = self._shown, []
        for each, gradient, version in shown:
            copy, now = each._unsharded_param, each._unsharded_param.grad
            if isinstance(now, InShards):
                copy.grad = None
            if now is None:
                each.sharded_param.grad = each.unsharded_accumulated_grad = None
            elif now is not gradient:
                raise RuntimeError(_ASSIGNED)
            elif now.is_zeroed if isinstance(now, InShards) else now._version != version and not now.any():
                _clear(each.sharded_param, set_to_none=False)
                each.unsharded_accumulated_grad = None

    def _kept(self) -> list[_Unit]:
        """The units that are gathered now."""
        return [(unit, groups) for unit, groups in self._units if not all(group.is_sharded for group in groups)]

    def _hook(self, kept: list[_Unit]) -> None:
        """See Note [torch.autograd.grad of gathered copies]."""
        for each in _params(kept):
            copy = each.unsharded_param
            if copy.requires_grad and self._hooked.get(id(copy)) is not copy:
                self._hooked[id(copy)] = copy
                self._hooks.append(copy.register_hook(functools.partial(self._computed, node_of(copy))))

    def _computed(self, node: Any, gradient: Tensor) -> None:
        """A gradient of a gathered copy is computed: keep the copies, if `torch.autograd.grad` asked for it."""
        if self._is_watching or self._held or not is_result_of_grad(node):
            return
        if torch.is_grad_enabled():
            raise RuntimeError(_SECOND.format(model=user_class(self._module).__name__))
        for unit in self._kept():
            flags = [group.reshard_after_backward for group in unit[1]]
            self._held.append((unit, flags, [each.unsharded_param._version for each in _params([unit])]))
            for group in unit[1]:
                group.reshard_after_backward = False

    def _watched(self, is_watching: bool) -> None:
        self._is_watching = is_watching
        for send in self._send_zeros:
            send(is_watching)

    def _let_go(self) -> None:
        """Free the copies from now on as usual."""
        for (_, groups), flags, _ in self._held:
            for group, flag in zip(groups, flags, strict=True):
                group.reshard_after_backward = flag
        self._held = []

    def _refuse_written(self) -> None:
        """Raise RuntimeError if a copy that was kept after `torch.autograd.grad`, or its gradient, was written to."""
        held = [
            (each, version)
            for unit, _, versions in self._held
            for each, version in zip(_params([unit]), versions, strict=True)
        ]
        self._let_go()
        unreduced = {each for each, _, _ in self._unreduced}
        for each, version in held:
            copy = each._unsharded_param
            if copy._version != version or (copy.grad is not None and each not in unreduced):
                copy.grad = None
                raise RuntimeError(_WRITTEN.format(model=user_class(self._module).__name__))

    def _find_unreduced(self, before: list[tuple[tuple[Any, Tensor, int], list[tuple[Tensor, int]]]]) -> None:
        self._watched(False)
        # A loss of another model leaves these as they are: the backward that reduces them comes later.
        left = {each[0]: each for each, marks in before if marks and _are_same(marks, unreduced(each[0]))}
        lost = [
            unit
            for unit, groups in self._kept()
            if all(group.reduce_grads for group in groups)
            and any(unreduced(each) and each not in left for group in groups for each in group.fsdp_params)
        ]
        if lost:
            raise RuntimeError(_LOST.format(unit=user_class(cast(nn.Module, lost[0])).__name__))
        self._unreduced = list(left.values())
        for each in _params(unit for unit in self._units if not all(group.reduce_grads for group in unit[1])):
            if unreduced(each) and each not in left:
                shard = each.sharded_param
                if shard.grad is None:
                    shard.grad = torch.zeros_like(shard)
                self._unreduced.append((each, shard.grad, shard.grad._version))

    def _drop_discarded(self) -> None:
        kept = []
        for each, gradient, version in self._unreduced:
            if each.sharded_param.grad is gradient and gradient._version == version:
                kept.append((each, gradient, version))
            else:
                each.unsharded_accumulated_grad = None
                each._unsharded_param.grad = None
        self._unreduced = kept


leave_uncompiled(Gathered.leave_unit)


def take_as_root(module: nn.Module, units: Sequence[FSDPModule]) -> None:
    """Make the model the root of its units, if it is one. Otherwise the first unit that runs becomes a root."""
    if module in cast("Sequence[nn.Module]", units):
        try:
            cast(Any, module)._get_fsdp_state()._lazy_init()
        except AssertionError as error:
            if "uniform original parameter dtype" in str(error):
                raise ValueError(_DTYPES.format(model=user_class(module).__name__, error=error)) from error
            raise


def _expose_outputs(unit: nn.Module) -> Callable[[], None]:
    """Let the hook of `fully_shard`, and no hook of the user's, see exposed outputs. Returns a function that undoes
    it."""
    hooks, state = unit._forward_hooks, cast(Any, unit)._get_fsdp_state()
    own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is state}

    def around(hook: Callable[..., Any]) -> Hook:
        return Hook(lambda unit, args, output: conceal(hook(unit, args, expose(output))))

    hooks.update({key: around(hook) for key, hook in own.items()})
    return lambda: hooks.update({key: hook for key, hook in own.items() if key in hooks})


def mark_gathering(module: nn.Module, method: str, gathered: Gathered) -> None:
    """Make another method of a module that `fully_shard` was called on gather, as its forward does."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    object.__setattr__(module, method, _checked(module, getattr(module, method), gathered))
    register_fsdp_forward_method(module, method)
    object.__setattr__(module, method, gathered.around(getattr(module, method)))


def _checked(unit: nn.Module, function: Callable[..., Any], gathered: Gathered) -> Callable[..., Any]:
    """A method whose changes of gathered parameters raise, as those of forward do."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        gathered.leave_unit(unit)
        return expose(output)

    leave_uncompiled(checked)
    return checked


@final
class _ZeroGrad:
    """`zero_grad` of a sharded module."""

    def __init__(self, gathered: Gathered, part: nn.Module) -> None:
        self._gathered, self._part = gathered, part
        self._given = part.zero_grad

    def __call__(self, set_to_none: bool = True) -> None:
        self._given(set_to_none)
        self._gathered.zero_grad(self._part, set_to_none=set_to_none)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._part, "zero_grad")  # a copy gets the method of its class


_LOST = (
    "This backward gave gradients to parameters of `{unit}` that are averaged over no ranks: they were used after a "
    "forward, and none of its outputs is part of this loss. Use parameters within `forward`, or in a method of the "
    "model after `model.mark_forward_method('name')`; and return tensors, not a function or a generator that has them."
)


_BYPASSED = (
    "`{name}` of `{model}` was called as a method, and its parameters are sharded: `fully_shard` gathers them where "
    "the model itself is called. Write `model(...)`, and `self(...)` in a method of the model."
)
_DTYPES = (
    "`{model}` has trained parameters of several dtypes in one unit of `fully_shard`, which reduces the gradients of a "
    "unit together ({error}). Convert them to one dtype before `fabric.setup`; or make a unit of each module of "
    "another dtype, `FSDPStrategy(auto_wrap_policy={{ItsClass}})`; or pass `strategy='ddp'`."
)
_READ = (
    "that `fully_shard` keeps in shards over the ranks: between forward and backward `parameter.grad` has no values. "
    "For the norm, call `fabric.clip_gradients(model, optimizer, max_norm=...)`; read gradients after backward."
)
_SECOND = (
    "`torch.autograd.grad(..., create_graph=True)` of parameters of `{model}`, which are in shards: `fully_shard` "
    "frees the gathered ones after it, and second derivatives need them. Pass `strategy='ddp'` for a loss that "
    "contains gradients of parameters; gradients of inputs, computed within `forward`, may be part of it."
)
_WRITTEN = (
    "Parameters of `{model}`, or their `grad`, were written to after `torch.autograd.grad`: these are gathered copies "
    "of the shards that the optimizer steps, so nothing would be trained. Compute gradients by `fabric.backward(loss)` "
    "and call `optimizer.step()`, or pass `strategy='ddp'`."
)
_ASSIGNED = (
    "A parameter was given another gradient by assignment to `grad` between forward and backward, and `fully_shard` "
    "would step with the one it keeps in shards. Assign it after backward, or change the loss. `None` discards the "
    "gradient."
)
_REPLACED = (
    "Parameters of `{model}` were replaced after `fabric.setup`, and `fully_shard` would run with those from before: "
    "{names}. Replace and parametrize before `setup`; to give other values, copy them in place (`parameter.copy_(...)` "
    "under `torch.no_grad()`), or load a state dict. `torch.func.functional_call` replaces them, too."
)


def _groups(unit: FSDPModule) -> list[Any]:
    """The parameter groups of a unit: one up to torch 2.12, several from then on."""
    state = cast(Any, unit)._get_fsdp_state()
    found = vars(state).get("_fsdp_param_groups")
    groups = [state._fsdp_param_group] if found is None else found
    return [group for group in groups if group is not None]


def _params(units: Iterable[_Unit]) -> Iterator[Any]:
    """Each parameter as torch's FSDPParam: its shard, its gathered copy, and its unreduced gradient."""
    return (each for _, groups in units for group in groups for each in group.fsdp_params)


def _places(params: Iterable[Any]) -> list[tuple[nn.Module, dict[str, Any], str, Any]]:
    """Where the model stores each parameter: the modules, also of tied ones, with the dicts and names in them."""
    found = []
    for each in params:
        info = each._module_info
        parts, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
        for part, name in zip(parts, names, strict=True):
            if part._parameters.get(name) is each.sharded_param:
                found.append((part, part._parameters, name, each))
    return found


def unreduced(each: Any) -> list[tuple[Tensor, int]]:
    """The gradients of a gathered copy that are not reduced yet, with their versions."""
    copy = vars(each).get("_unsharded_param")  # absent before the first forward
    found = (each.unsharded_accumulated_grad, None if copy is None else copy.grad)
    return [(gradient, gradient._version) for gradient in found if gradient is not None]


def _are_same(marks: list[tuple[Tensor, int]], others: list[tuple[Tensor, int]]) -> bool:
    return len(marks) == len(others) and all(a is b and v == w for (a, v), (b, w) in zip(marks, others, strict=True))


def _versions(units: Iterable[_Unit]) -> list[tuple[int, int]]:
    """Versions of shards: an optimizer writes to the `DTensor`, or to its local tensor."""
    shards = [each.sharded_param for each in _params(units)]
    return [(shard._version, shard._local_tensor._version) for shard in shards]


def _clear(parameter: Tensor, *, set_to_none: bool) -> None:
    """The same as `nn.Module.zero_grad`, for one parameter."""
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.detach_().zero_()
