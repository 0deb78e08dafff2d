"""A model cut into stages: each stage a tree of modules that shares with the user's model all that lies whole in it.

The user's model stays whole as a tree, under its own names, and loses the tensors of other ranks' stages: it is what
the user calls, saves and inspects. What torch runs are the stages. A module that a stage has with everything in it is
the user's own object there, hooks and all; only the modules that are cut, the root among them, are copies, made at
set-up. Copies follow `train()` and `eval()`; other attributes that are set on them later do not reach the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import final

from torch import Tensor, nn

from fabric.strategies.model_parallel.pipeline.options import Pipeline, Split

TREE = ("_modules", "_parameters", "_buffers")
"""What `nn.Module` keeps a tree in."""


@final
@dataclass(slots=True)
class Stage:
    """One stage, and the modules in it that are copies, each with the user's own."""

    index: int
    module: nn.Module
    copies: list[tuple[nn.Module, nn.Module]]

    def follow_mode(self) -> None:
        """Take over `training` from the user's model."""
        for copy, own in self.copies:
            copy.training = own.training


def cut(model: nn.Module, options: Pipeline) -> list[Stage]:
    """All stages of a model, which is left as it is. They share its tensors.

    Raises: ValueError: a parameter or buffer is in no stage, or a parameter in two; TypeError: `split` gave no module.
    """
    split = options.split if callable(options.split) else _at(options.split)
    stages = [_cut(model, split, index, options.num_stages) for index in range(options.num_stages)]
    _check(model, stages)
    return stages


def drop_others(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Let the user's model forget the tensors that are in none of `stages`, which are those of this rank."""
    kept = {name for stage in stages for name, _ in _tensors(stage.module)}
    for name, _ in list(_tensors(model)):
        if name not in kept:
            _set(model, name, None)


def take_over(stages: Sequence[Stage], model: nn.Module) -> None:
    """Give the stages the tensors that the user's model has under the same names."""
    tensors = dict(_tensors(model))
    for stage in stages:
        for name, _ in list(_tensors(stage.module)):
            _set(stage.module, name, tensors[name])


def give_back(stages: Sequence[Stage], model: nn.Module) -> None:
    """Give the user's model the tensors that the stages have now.

    Raises: ValueError: a stage has a name that the model has not.
    """
    names = {name for name, _ in _tensors(model)}
    for stage in stages:
        for name, tensor in list(_tensors(stage.module)):
            if name not in names:
                raise ValueError(
                    f"Stage {stage.index} has `{name}` after `parallelize_fn`, and the model has no such name. Change "
                    "tensors and modules in place; a wrapper that adds to their names cannot be undone on saving."
                )
            _set(model, name, tensor)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _set(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    # Not by `setattr`, which registers None as a plain attribute's value, and refuses a buffer's new class.
    (owner._parameters if last in owner._parameters else owner._buffers)[last] = tensor  # type: ignore[assignment]


def _cut(model: nn.Module, split: Split, index: int, num_stages: int) -> Stage:
    copies: dict[nn.Module, nn.Module] = {}
    module = split(_copied(model, copies, is_root=True), index, num_stages)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`split(model, {index}, {num_stages})` gave {module!r}. Give back the model that it was given, cut."
        )
    own = {copy: original for original, copy in copies.items()}
    module = _settled(module, own, set(model.modules()), is_root=True)
    return Stage(index, module, [(part, own[part]) for part in module.modules() if part in own])


def _copied(module: nn.Module, copies: dict[nn.Module, nn.Module], *, is_root: bool = False) -> nn.Module:
    """A copy of the tree, whose leaves are the user's own modules."""
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


def _settled(
    module: nn.Module, own: dict[nn.Module, nn.Module], users: set[nn.Module], *, is_root: bool = False
) -> nn.Module:
    """Put the user's own module wherever its copy was not cut. The root stays a copy: it is given a forward of ours."""
    if module in users:
        return module
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _settled(child, own, users)
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
    homes: dict[int, tuple[int, str]] = {}
    seen: set[str] = set()
    for stage in stages:
        for name, tensor in _tensors(stage.module):
            if whole.get(name) is not tensor:
                raise ValueError(
                    f"Stage {stage.index} has `{name}`, which the model has not, or as another tensor. `split` removes "
                    "the parts of other stages, and leaves names and tensors as they are."
                )
            seen.add(name)
            if isinstance(tensor, nn.Parameter):
                home, first = homes.setdefault(id(tensor), (stage.index, name))
                if home != stage.index and first == name:
                    raise ValueError(f"`{name}` is in stages {home} and {stage.index}. Let `split` leave it in one.")
                if home != stage.index:
                    raise ValueError(
                        f"`{first}` and `{name}` are one tied weight, but lie in stages {home} and {stage.index}, and "
                        "each would be trained on its own from then on. Cut elsewhere, or untie them."
                    )
    for name in whole:
        if name not in seen:
            raise ValueError(f"`{name}` is in none of the {len(stages)} stages. Let `split` leave it in one.")


def _at(starts: Sequence[str]) -> Split:
    """Cut an `nn.Sequential`, and those in it, where the named parts begin."""

    def split(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
        names = [name for name, _ in model.named_modules()]
        for start in starts:
            if start not in names or not start:
                near = "".join(f"Did you mean {match!r}? " for match in get_close_matches(start, names, n=1))
                raise ValueError(f"`split` names {start!r}, which is no part of the model. {near}Write a part's name.")
        found: list[str] = []
        for owner, name, full in list(_parts(model, starts)):
            if full in starts:
                found.append(full)
            if len(found) != stage:
                del owner._modules[name]  # its own `del` would number the others anew
        if found != list(starts):
            raise ValueError(f"`split={list(starts)!r}`, but the parts follow each other as {found!r}. Write them so.")
        return model

    return split


def _parts(model: nn.Module, starts: Iterable[str], prefix: str = "") -> Iterator[tuple[nn.Module, str, str]]:
    """The parts that lie in one stage each, in the order of forward: owner, name there, and name in the model."""
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"`split` names a part of `{prefix.rstrip('.') or 'the model'}`, a `{type(model).__name__}`: only an "
            "`nn.Sequential` is known to be its parts one after the other. Pass a function `(model, stage, num_stages) "
            "-> model` that cuts it."
        )
    for name, part in list(model._modules.items()):
        full = f"{prefix}{name}"
        if part is not None and any(start.startswith(f"{full}.") for start in starts):
            if full in starts:
                raise ValueError(f"`split` names {full!r} and a part within it. Name the first part within it alone.")
            yield from _parts(part, starts, f"{full}.")
        else:
            yield model, name, full
