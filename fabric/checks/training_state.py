"""The training state that ranks should have in common, with digests: hyperparameters, gradients, weights, states.

`StateAccess` tells which part of each tensor a rank holds, and which ranks hold the same part.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.checks.agreement import Fact, Kind, Value, digest_of_text
from fabric.strategies.checkpoint.state import PlainState, StateAccess
from fabric.strategies.checkpoint.tensors import TensorShards, replicated
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.digest import numbers_of
from fabric.strategies.tensors.parameters import parameters_of
from fabric.strategies.tensors.wrapper_subclass import plain_tensors

Parameters: TypeAlias = Mapping[str, nn.Parameter]
"""By their names."""


def modes_of(modules: Iterable[nn.Module], everyone: tuple[int, ...]) -> dict[Fact, Value]:
    """Which layers of dropout and BatchNorm are in training mode. Others compute alike in both modes."""
    modes: dict[Fact, Value] = {}
    for number, module in enumerate(modules):
        modal = [part.training for part in module.modules() if isinstance(part, _MODAL) and getattr(part, "p", 1) > 0]
        name = (
            f"the number of layers of dropout or BatchNorm in training mode, of `{type(module).__name__}` ({number}),"
        )
        modes[Fact("modes", name, everyone)] = Value(digest_of_text(str(modal)), f"{sum(modal)} of {len(modal)}")
    return modes


DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MODAL = (*DROPOUT, *BATCH_NORM, nn.SyncBatchNorm)


def options_of(optimizer: Optimizer, num_steps: int, everyone: tuple[int, ...]) -> dict[Fact, Value]:
    """The steps and hyperparameters of one optimizer. Numbers are rounded: libraries of mathematics differ. Tensors are
    left out: a hyperparameter that learns is a state."""
    name = type(optimizer).__name__
    texts: dict[tuple[Kind, str], str] = {("steps", f"the number of steps of `{name}`"): str(num_steps)}
    for number, group in enumerate(optimizer.param_groups):
        of = f"of parameter group {number} of `{name}`"
        texts.update(
            {("options", f"`{key}` {of}"): text for key in optimizer.defaults if (text := _text(group.get(key)))}
        )
    return {Fact(*of, everyone): Value(digest_of_text(text), text) for of, text in texts.items()}


def gradients_of(
    optimizer: Optimizer, names: Mapping[int, str], everyone: tuple[int, ...], among: Container[int]
) -> dict[Fact, Value]:
    """The gradients with which an optimizer is about to step, where all ranks have them whole.

    `names`: of parameters, by their ids. `among`: the ids of the parameters to compare.
    """
    parameters = [each for each in enumerate(parameters_of(optimizer)) if id(each[1]) in among]
    digests = iter(numbers_of(each.grad for _, each in parameters if each.grad is not None))
    return {
        Fact("gradients", f"the gradient of {_named(each, index, names)}", everyone): (
            Value(0, "no gradient") if each.grad is None else Value(next(digests) % 2**64)
        )
        for index, each in parameters
    }


def weights_and_states(
    models: Sequence[tuple[Prepared, Parameters]], access: Mapping[Optimizer, StateAccess], runtime: Runtime
) -> dict[Fact, Value]:
    """The parts of parameters and optimizer states that this rank holds together with others. Ranks: all.

    `models`: each with the parameters that were set up. Parameters that are added later may differ until they are
    trained.
    """
    parts: dict[Fact, Tensor] = {}
    for kind, name, held in _held(models, access, runtime):
        if len(held.holders) > 1:
            for number, (chunk, part) in enumerate(held.shards):
                parts[Fact(kind, f"{name}{chunk.offsets if number else ''}", held.holders)] = part
    return {fact: Value(digest % 2**64) for fact, digest in zip(parts, numbers_of(parts.values()), strict=True)}


def names_in(models: Iterable[Prepared]) -> dict[int, str]:
    """The name of each parameter, by its id."""
    several = list(models)
    return {
        id(parameter): f"`{name}`" if len(several) == 1 else f"`{name}` of `{type(model.module).__name__}`"
        for model in several
        for name, parameter in model.module.named_parameters(remove_duplicate=False)
    }


def _held(
    models: Sequence[tuple[Prepared, Parameters]], access: Mapping[Optimizer, StateAccess], runtime: Runtime
) -> Iterator[tuple[Kind, str, TensorShards]]:
    names, size = names_in(model for model, _ in models), runtime.world.size
    for model, known in models:
        # An engine may train shards, and compute with whole weights, which it makes from them.
        how = _access(model.state, size, is_replicated=model.layout.weights == "replicas")
        parameters = dict(model.module.named_parameters(remove_duplicate=False))
        is_changed = any(known.get(name) is not each for name, each in parameters.items())
        if is_changed and not isinstance(how, PlainState):  # the strategy raises itself
            continue
        owners = {key: name for name, each in parameters.items() for key in plain_tensors(each, name)}
        for key, value in how.read_module(model.module).items():
            name = owners.get(key, "")
            parameter = parameters.get(name)
            if parameter is None or known.get(name) is not parameter:
                continue
            if isinstance(value, Tensor):  # not sharded
                value = replicated(value, range(size))
            if isinstance(value, TensorShards):
                yield "weights", _named(parameter, name, names) if key == name else f"`{key}`", value
    for optimizer, given in access.items():
        layouts = (model.layout for model, _ in models if model.holds(optimizer))
        how = _access(given, size, is_replicated=any(each.optimizer_states == "replicas" for each in layouts))
        of_groups = parameters_of(optimizer)
        # The program may have taken parameters out of its groups.
        if set(optimizer.state).difference(of_groups):
            continue
        for index, entries in how.read_optimizer(optimizer).get("state", {}).items():
            of = _named(of_groups[index], index, names) if index < len(of_groups) else f"parameter {index}"
            for name, value in entries.items():
                if isinstance(value, TensorShards):
                    yield "states", f"`{name}` of {of} in `{type(optimizer).__name__}`", value


def _named(parameter: Tensor, place: int | str, names: Mapping[int, str]) -> str:
    return names.get(id(parameter), f"parameter {place}")


def _access(access: StateAccess, size: int, *, is_replicated: bool) -> StateAccess:
    return PlainState(size) if is_replicated or isinstance(access, PlainState) else access


def _text(value: Any) -> str | None:
    if isinstance(value, tuple | list):
        return str([_text(each) for each in value])
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, bool | int | str | None) else None
