"""Checks of a model in `setup`, before anything is changed: that a strategy can train it, and that all ranks have the
same one. Each raises an error that says what to write instead.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabric.strategies.collectives.fabric_calls_check import check_call
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.dtensor import as_sharded, user_class
from fabric.strategies.tensors.packing import Spec
from fabric.strategies.tensors.parameters import name_some, own_tensors, uncompiled
from fabric.strategies.tensors.wrapper_subclass import frozen_wrapped, is_wrapped, plain_tensors


def refuse_different_models(
    runtime: Runtime,
    module: nn.Module,
    moment: str = "setup of",
    *,
    recurse: bool = True,
    fills_from_rank_zero: bool = False,
) -> None:
    """Raise unless the ranks have parameters and buffers of the same names, shapes and dtypes in the same order, and
    the same ones on the meta device (unless `fills_from_rank_zero`).

    Strategies match the tensors of ranks by their order. If the models differ, as where each rank makes experts of its
    own, gloo aborts or waits until its timeout, and tensors of the same shape are mixed silently.

    `moment`: begins the error. `recurse`: also the tensors of submodules.
    Ranks: all call it. Cost: one all-reduce of two numbers, and some microseconds per tensor; none in a world of one.
    Raises: CollectiveError on every rank, with the tensors of each rank. ValueError: a tensor of a lazy module has no
    shape yet.
    """
    if runtime.collective.size == 1:
        return
    inner = uncompiled(module)
    _refuse(inner, is_lazy, _LAZY)
    _refuse(inner, lambda tensor: tensor.is_nested, _NESTED)
    _refuse(inner, _is_expanded, _EXPANDED)

    def words(tensor: Tensor) -> str:
        there = ", on the meta device" if tensor.is_meta and not fills_from_rank_zero else ""
        return _words(tensor) + there

    lines = [
        *(f"{name}: {words(each)}" for name, each in inner.named_parameters(recurse=recurse)),
        *(f"{name}: {words(each)}, a buffer" for name, each in inner.named_buffers(recurse=recurse)),
    ]
    call = "\n".join([f"{moment} `{type(inner).__name__}`", *lines])
    check_call(runtime.collective, call, advice=_SAME)


def refuse_meta(module: nn.Module) -> None:
    """Raise ValueError if a tensor is on the meta device, for a strategy that initialises none."""
    _refuse(uncompiled(module), lambda tensor: tensor.is_meta, _ON_META)


def refuse_scalars(module: nn.Module) -> None:
    """Raise ValueError for a parameter without dimensions, which `fully_shard` cannot shard."""
    _refuse(
        module,
        lambda tensor: isinstance(tensor, nn.Parameter) and tensor.ndim == 0,
        f"{{names}} of `{{model}}`: {SCALARS}",
    )


def refuse_sharded(module: nn.Module, instead: str) -> None:
    """Raise ValueError if a parameter is sharded before `setup`.

    `instead`: what to write, with `{name}` for the class of its module.
    """
    for name, part in module.named_modules():
        sharded = [
            each for each, parameter in part.named_parameters(recurse=False) if as_sharded(parameter) is not None
        ]
        if sharded:
            units = [each for each in module.modules() if user_class(each) is not type(each) and part in each.modules()]
            full = f"{name}.{sharded[0]}".lstrip(".")
            raise ValueError(
                f"`{full}` is in shards before `fabric.setup`, each with values of its own rank, and all ranks start "
                f"from the weights of rank 0. {instead.format(name=user_class((units or [part])[-1]).__name__)}"
            )


def refuse_sparse_layers(strategy: str, module: nn.Module, *, sharded: bool = False) -> None:
    """Raise ValueError if a trained embedding has `sparse=True`: reduce-scatter and flat gradients are dense.

    `sharded`: only an embedding whose weight is a DTensor.
    """
    for name, part in module.named_modules():
        if not (isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad):
            continue
        if sharded and as_sharded(part.weight) is None:
            continue
        place = f"`{name}` of `{type(module).__name__}`" if name else f"The `{type(part).__name__}`"
        raise ValueError(
            f"{place} has `sparse=True`, and `strategy={strategy!r}` reduces dense gradients. Make the layer with "
            "`sparse=False`, and train it by the optimizer of the dense counterpart (Adam for SparseAdam); or pass "
            "`strategy='ddp'`, which averages sparse gradients, too."
        )


def refuse_tied_apart(module: nn.Module, units: set[nn.Module], option: str) -> None:
    """Raise ValueError if two units share a weight: each would shard a copy of its own. `option`: what chose them."""
    homes: dict[Tensor, nn.Module] = {}
    for unit in units:
        for tensor in own_tensors(unit, units):
            if isinstance(tensor, nn.Parameter) and homes.setdefault(tensor, unit) is not unit:
                named = module.named_parameters(remove_duplicate=False)
                raise ValueError(
                    f"{' and '.join(f'`{name}`' for name, each in named if each is tensor)} are one tied weight, but "
                    f"`{option}` puts them into different parts, and each would have its own from then on. Choose a "
                    "part that holds both, or neither."
                )


def refuse_shared_memory(module: nn.Module) -> None:
    """Raise ValueError if the memory of a parameter overlaps that of another tensor, for a strategy that stores
    parameters anew: the two would change apart from then on. Side by side in one storage they may be."""
    in_storage: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and 0 not in tensor.stride():
            place = tensor.untyped_storage().data_ptr(), tensor.element_size()
            in_storage.setdefault(place, []).append((name, tensor))
    for (address, size), named in in_storage.items():
        if address == 0 or len(named) == 1:  # 0: empty, or on the meta device
            continue
        taken = torch.zeros(named[0][1].untyped_storage().nbytes() // size, dtype=torch.bool)
        for name, tensor in named:
            elements = taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if elements.any():
                raise ValueError(_SHARED.format(name=name, other=named[0][0], model=type(module).__name__))
            if isinstance(tensor, nn.Parameter):
                elements.fill_(True)


def refuse_wrapped_in_flat(module: nn.Module, strategy: str) -> None:
    """Raise ValueError for frozen wrapper subclasses, such as quantised weights, under a strategy that flattens all
    parameters."""
    frozen = frozen_wrapped(module)
    if frozen:
        raise ValueError(
            f"{len(frozen)} frozen parameters of `{type(module).__name__}` ({name_some(list(frozen))}) are of "
            f"`{type(next(iter(frozen.values()))).__name__}`, and `strategy={strategy!r}` flattens every parameter, "
            "which such tensors do not allow. Pass `strategy='fsdp'`, which leaves them whole on each rank, 'ddp' or "
            "'deepspeed_stage_2'."
        )


def _refuse(module: nn.Module, is_refused: Callable[[Tensor], bool], sentence: str) -> None:
    """Raise ValueError with the sentence if the predicate is true of a parameter or a buffer."""
    named = [*module.named_parameters(), *module.named_buffers()]
    names = [name for name, tensor in named if is_refused(tensor)]
    if names:
        raise ValueError(sentence.format(names=name_some(names), model=type(module).__name__, count=len(names)))


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or "ds_shape" in vars(tensor):  # a shard of DeepSpeed, made before `setup`
        return False
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in dims)


def _words(tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    inner = plain_tensors(tensor).values() if is_wrapped(tensor) else ()
    of = f", of {', '.join(str(Spec.of(each)) for each in inner)}" if inner else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}{of}"


_ON_META = (
    "{count} tensors of `{model}` ({names}) are on the meta device, and have no values. Make the model without "
    "`torch.device('meta')`, or within `fabric.init_module(empty_init=True)` and load its weights after `setup`; "
    "`strategy='fsdp'` takes models on the meta device, and initialises them in shards."
)
_SAME = (
    "`fabric.setup` needs the same model on every rank, made in the same order (a `set` has another on each rank), and "
    "on the meta device on every rank or on none (`strategy='fsdp'` takes one that is made on rank 0 alone). Where "
    "each rank has a part of its own, such as experts of other sizes, pass `strategy=ManualStrategy(...)`."
)
_LAZY = (
    "{count} tensors of `{model}` ({names}) have no shape yet: they are of lazy modules, such as `nn.LazyLinear`, "
    "which make them in the first forward. Run one before `fabric.setup`, on all ranks: `model(torch.zeros(1, 8))`."
)
_NESTED = (
    "{count} tensors of `{model}` ({names}) are nested tensors, which ranks cannot send to one another. Keep what they "
    "are made of as parameters and buffers: `nested.values()` and `nested.offsets()`."
)
_EXPANDED = (
    "{count} tensors of `{model}` ({names}) have several elements in one memory location, as `tensor.expand(...)` "
    "makes them, and ranks write each element. Write `tensor.expand(...).clone()`."
)
SCALARS = (
    "torch's `fully_shard` cuts each parameter along its first dimension, and one without dimensions has none. Make it "
    "of shape `(1,)`, as in `nn.Parameter(torch.ones(1))`, or pass `strategy='ddp'` or a stage of DeepSpeed."
)
_SHARED = (
    "`{name}` of `{model}` shares memory with `{other}`, as a parameter that was made of `weight.t()` does: this "
    "strategy gives each parameter memory of its own, and they would change apart. Use one parameter in both places, "
    "`functional.linear(x, self.{other}.t())`; or copy it, `weight.t().clone()`; or pass `strategy='ddp'`."
)
