"""Guards for a program that itself calls `state_dict` or `load_state_dict` of a sharded model or its optimizer: a state
of shards is reported, and whole tensors are refused."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import KeepsNamesAndShapes, StateAccess
from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.tensors.parameters import parameters_of

HOW_TO_SAVE = (
    "write `fabric.save(path, {'model': model})`, or call `state = fabric.state_dict(model)` on every rank; on rank 0, "
    "then, `torch.save(state, path)` or `model.save_pretrained(path, state_dict=state)`."
)


_EMPTY = (
    "has no values at ZeRO stage 3 between forwards. To keep weights in memory, write on every rank "
    "`with fabric.gathered(model):` around it, and `with fabric.gathered(model, write=True):` around "
    f"`model.load_state_dict(...)`. For a file, {HOW_TO_SAVE}"
)
_LOAD = (
    "Load it before `fabric.setup`, by `fabric.load_raw(path, model)`, or, on every rank, within "
    "`with fabric.gathered(model, write=True):`."
)


def report_shards(module: nn.Module, access: StateAccess, report: Callable[[str], None]) -> Callable[[], None]:
    """Report, once, that the program itself has called `state_dict()` of a sharded model, or of a submodule, and refuse
    `load_state_dict` of whole tensors, which torch refuses in words of its own.

    Returns a function that removes the hooks. A model that is not sharded gets none. Ranks: each on its own.
    """
    if not access.empties_parameters and all(as_sharded(each) is None for each in module.parameters()):
        return lambda: None
    names: list[str] = []

    def hook(part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if names or prefix or _is_called_by_a_library():
            return
        found = [name for name, shape in access.shapes(part).items() if _is_shard(state.get(name), shape)]
        if found and access.empties_parameters:
            raise RuntimeError(f"`{type(part).__name__}.state_dict()`: {found[0]!r} {_EMPTY}")
        names.extend(found)
        if names:
            report(
                f"`{type(part).__name__}.state_dict()`: the model is sharded, and {names[0]!r} has only this rank's "
                f"part of the weights, so that a file of it cannot be loaded. For a file, {HOW_TO_SAVE}"
            )

    handles = [part.register_state_dict_post_hook(hook) for part in module.modules()]  # type: ignore[no-untyped-call]
    handles += [part.register_load_state_dict_pre_hook(RefuseWhole()) for part in module.modules()]  # type: ignore[no-untyped-call]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


class RefuseWhole(KeepsNamesAndShapes):
    """A hook of `load_state_dict`: whole tensors are refused, unless a library has called it."""

    def __call__(self, part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in () if _is_called_by_a_library() else part.named_parameters(recurse=False):
            given = state.get(prefix + name)
            if isinstance(given, Tensor) and as_sharded(given) is None and _is_shard(parameter, tuple(given.shape)):
                written = f"`load_state_dict`: the model is sharded, and {prefix + name!r} is given as a whole tensor."
                raise ValueError(f"{written} {_LOAD}")


def refuse_whole_states(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """A hook of an optimizer's `load_state_dict`: whole tensors are refused for parameters that are DTensors."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        for name, given in state["state"].get(number, {}).items() if as_sharded(parameter) is not None else ():
            if isinstance(given, Tensor) and given.shape == parameter.shape and as_sharded(given) is None:
                raise ValueError(
                    f"`{type(optimizer).__name__}.load_state_dict`: parameters are sharded, and {name!r} of parameter "
                    f"{number} is given as a whole tensor. Load it before `fabric.setup`, or by "
                    "`fabric.load_raw(path, optimizer)`."
                )


def _is_shard(tensor: Any, shape: tuple[int, ...] | None) -> bool:
    """Whether the tensor is a shard of a tensor of this shape; None: the entry is no tensor."""
    return shape is not None and (tensor is None or as_sharded(tensor) is not None or tuple(tensor.shape) != shape)


def _is_called_by_a_library() -> bool:
    """Whether fabric, torch.distributed or a backend has called `state_dict` or `load_state_dict`: they know shards."""
    frame, name = inspect.currentframe(), __name__
    while frame is not None and (
        name.startswith((__name__, "torch.nn.")) or frame.f_code.co_name in ("state_dict", "load_state_dict")
    ):
        frame = frame.f_back
        name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name.startswith(("fabric.", "torch.distributed.", "deepspeed.", "fairscale."))
