"""Split a model into stages: each is a tree of modules that shares submodules and tensors with the user's model.

The user's model keeps all its modules and names, and loses the tensors of other ranks' stages: the user calls, saves
and inspects it. torch runs the stages. A submodule that is completely in one stage is the user's own object there,
with its hooks. Modules that are split, and the root, are copied at setup. Copies follow `train()` and `eval()`; other
attributes that are set on the user's model later do not reach the stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from fabric.strategies.model_parallel.pipeline.options import Pipeline, Split

TREE = ("_modules", "_parameters", "_buffers")
"""The dicts of `nn.Module` that make up the tree."""


@final
@dataclass(slots=True)
class Stage:
    """One stage, and its modules that are copies, each with the original."""

    index: int
    module: nn.Module
    copies: list[tuple[nn.Module, nn.Module]]

    def copy_mode(self) -> None:
        """Copy `training` from the user's model."""
        for copy, own in self.copies:
            copy.training = own.training


def split_model(model: nn.Module, options: Pipeline) -> list[Stage]:
    """All stages of a model, which is not changed. They share its tensors.

    Raises: ValueError: a parameter or buffer is in no stage, or a parameter in two; TypeError: `split` returned no
    module.
    """
    stages = [_make_stage(model, options.split, index, options.num_stages) for index in range(options.num_stages)]
    _check(model, stages)
    return stages


def drop_other_stages(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Set the tensors of the user's model that are in none of `stages`, the stages of this rank, to None."""
    kept = {name for stage in stages for name, _ in _tensors(stage.module)}
    for name, _ in list(_tensors(model)):
        if name not in kept:
            _set(model, name, None)


def assign(source: nn.Module, target: nn.Module) -> None:
    """Set the tensors of `target` to the tensors of the same names in `source`."""
    tensors = dict(_tensors(source))
    for name, _ in list(_tensors(target)):
        if name in tensors:
            _set(target, name, tensors[name])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _set(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    # Not by `setattr`, which makes None a plain attribute, and raises for a buffer of another class.
    (owner._parameters if last in owner._parameters else owner._buffers)[last] = tensor  # type: ignore[assignment]


def _make_stage(model: nn.Module, split: Split, index: int, num_stages: int) -> Stage:
    copies: dict[nn.Module, nn.Module] = {}
    module = split(_copied(model, copies, is_root=True), index, num_stages)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`split(model, {index}, {num_stages})` returned {module!r}. Return the model that it was passed."
        )
    own = {copy: original for original, copy in copies.items()}
    module = _with_originals(module, own, set(model.modules()), is_root=True)
    return Stage(index, module, [(part, own[part]) for part in module.modules() if part in own])


def _copied(module: nn.Module, copies: dict[nn.Module, nn.Module], *, is_root: bool = False) -> nn.Module:
    """A copy of the tree; its leaves are the user's own modules."""
    if not is_root and not module._modules:
        return module
    if module not in copies:
        copies[module] = copy = module.__new__(type(module))
        vars(copy).update(vars(module))
        vars(copy).update({name: vars(module)[name].copy() for name in (*TREE, "_non_persistent_buffers_set")})
        for name, child in module._modules.items():
            if child is not None:
                copy._modules[name] = _copied(child, copies)
    return copies[module]


def _with_originals(
    module: nn.Module, own: dict[nn.Module, nn.Module], users: set[nn.Module], *, is_root: bool = False
) -> nn.Module:
    """Replace copies that were not split by the originals. The root remains a copy, because its forward is wrapped."""
    if module in users:
        return module
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _with_originals(child, own, users)
    original = own.get(module)
    return module if is_root or original is None or _contents(module) != _contents(original) else original


def _contents(module: nn.Module) -> dict[str, Any]:
    """All attributes by identity; the dicts of the tree by their entries."""
    attributes = {name: id(value) for name, value in vars(module).items()}
    tree = {name: {key: id(each) for key, each in vars(module)[name].items()} for name in TREE}
    return {**attributes, **tree, "_non_persistent_buffers_set": module._non_persistent_buffers_set}


def _check(model: nn.Module, stages: Sequence[Stage]) -> None:
    whole = dict(_tensors(model))
    owners: dict[int, tuple[int, str]] = {}
    seen: set[str] = set()
    for stage in stages:
        for name, tensor in _tensors(stage.module):
            if whole.get(name) is not tensor:
                raise ValueError(
                    f"Stage {stage.index} has `{name}`, which the model does not have, or has as another tensor. Let "
                    "`split` remove the submodules of other stages, and leave names and tensors as they are."
                )
            seen.add(name)
            if isinstance(tensor, nn.Parameter):
                owner, first = owners.setdefault(id(tensor), (stage.index, name))
                if owner != stage.index:
                    raise ValueError(
                        f"One parameter is `{first}` in stage {owner} and `{name}` in stage {stage.index}, where it "
                        "would be trained separately. Let `split` leave it in one, or untie the weights."
                    )
    for name in whole:
        if name not in seen:
            raise ValueError(f"`{name}` is in none of the {len(stages)} stages. Let `split` leave it in one.")
