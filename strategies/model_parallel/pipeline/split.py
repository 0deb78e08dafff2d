"""Split a model into stages: each is a tree of modules that shares submodules and tensors with the user's model.

The user's model keeps all its modules and names, and loses the tensors of other ranks' stages: the user calls, saves
and inspects it. torch runs the stages. A submodule that is completely in one stage is the user's own object there,
with its hooks. Modules that are split, and the root, are copied at setup. Copies follow `train()` and `eval()`; other
attributes that are set on the user's model later do not reach the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

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
    split = options.split if callable(options.split) else _split_at(options.split)
    stages = [_make_stage(model, split, index, options.num_stages) for index in range(options.num_stages)]
    _check(model, stages)
    return stages


def drop_other_stages(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Set the tensors of the user's model to None that are in none of `stages`, those of this rank."""
    kept = {name for stage in stages for name, _ in _tensors(stage.module)}
    for name, _ in list(_tensors(model)):
        if name not in kept:
            _set(model, name, None)


def assign_to_stages(stages: Sequence[Stage], model: nn.Module) -> None:
    """Set the tensors of the stages to those of the user's model, by name."""
    tensors = dict(_tensors(model))
    for stage in stages:
        for name, _ in list(_tensors(stage.module)):
            _set(stage.module, name, tensors[name])


def assign_to_model(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Set the tensors of the user's model to those of the stages, by name.

    Raises: ValueError: a stage has a name that the model does not have.
    """
    names = {name for name, _ in _tensors(model)}
    for stage in stages:
        for name, tensor in list(_tensors(stage.module)):
            if name not in names:
                raise ValueError(
                    f"Stage {stage.index} has `{name}` after `parallelize_fn`, and the model has no such name. Change "
                    "tensors and modules in place, without wrappers that change names: checkpoints have the model's."
                )
            _set(model, name, tensor)


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
        vars(copy).update({name: dict(vars(module)[name]) for name in TREE})
        vars(copy)["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
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
    return original if not is_root and original is not None and _is_whole(module, original) else module


def _is_whole(copy: nn.Module, original: nn.Module) -> bool:
    mine, given = vars(copy), vars(original)
    if mine.keys() != given.keys() or mine["_non_persistent_buffers_set"] != given["_non_persistent_buffers_set"]:
        return False
    rest = mine.keys() - {*TREE, "_non_persistent_buffers_set"}
    return all(mine[name] is given[name] for name in rest) and all(
        mine[tree].keys() == given[tree].keys() and all(mine[tree][name] is given[tree][name] for name in given[tree])
        for tree in TREE
    )


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
                if owner != stage.index and first == name:
                    raise ValueError(f"`{name}` is in stages {owner} and {stage.index}. Let `split` leave it in one.")
                if owner != stage.index:
                    raise ValueError(
                        f"`{first}` and `{name}` are one tied weight, but in stages {owner} and {stage.index}, where "
                        "they would be trained separately. Split elsewhere, or untie them."
                    )
    for name in whole:
        if name not in seen:
            raise ValueError(f"`{name}` is in none of the {len(stages)} stages. Let `split` leave it in one.")


def _split_at(starts: Sequence[str]) -> Split:
    """Split an `nn.Sequential`, and those in it, at the named submodules."""

    def split(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
        names = [name for name, _ in model.named_modules() if name]
        unknown = [start for start in starts if start not in names]
        if unknown:
            raise ValueError(
                f"`split` names {unknown[0]!r}, which is no submodule of the model. Write one of "
                f"{', '.join(map(repr, names[:9]))}."
            )
        found: list[str] = []
        for owner, name, full in list(_parts(model, starts)):
            if full in starts:
                found.append(full)
            if len(found) != stage:
                del owner._modules[name]  # not by `del owner[...]`, which renumbers the others
        if found != list(starts):
            raise ValueError(f"`split={list(starts)!r}`, but the order in the model is {found!r}. Write that.")
        return model

    return split


def _parts(model: nn.Module, starts: Iterable[str], prefix: str = "") -> Iterator[tuple[nn.Module, str, str]]:
    """The submodules that are in one stage each, in the order of forward: owner, name in it, name in the model."""
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"`split` names a submodule of `{prefix.rstrip('.') or 'the model'}`, a `{type(model).__name__}`: only an "
            "`nn.Sequential` is known to call its submodules in order. Pass a function `(model, stage, num_stages) "
            "-> model` that splits it."
        )
    for name, part in list(model._modules.items()):
        full = f"{prefix}{name}"
        if part is not None and any(start.startswith(f"{full}.") for start in starts):
            if full in starts:
                raise ValueError(f"`split` names {full!r} and a submodule of it. Name only the latter.")
            yield from _parts(part, starts, f"{full}.")
        else:
            yield model, name, full
