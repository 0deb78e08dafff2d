"""The state of a model in stages, and of its optimizers: gathered from the ranks of the pipeline, and loaded.

Within a stage another `StateAccess` (`ShardedState`) gathers shards. Names are the user's, and an optimizer's
parameters have the indices that they had before `setup`, in the unsplit model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import PLAIN, StateAccess
from fabric.strategies.checkpoint.tensors import TensorShards, no_shards, replicated
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.optimizers.elementwise import updates_each
from fabric.strategies.tensors.nests import map_leaves
from fabric.strategies.tensors.parameters import parameters_of

_Group: TypeAlias = tuple[list[int], list[int]]
"""A parameter group before the model was split: the indices of the parameters that this rank holds, and of all."""


@final
class WholeModel:
    """Names and shapes of a model, indices and groups of its optimizers, before the model is split."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shapes = PLAIN.shapes(model)
        self.groups: dict[Optimizer, list[_Group]] = {}

    def leave(self, optimizers: Sequence[Optimizer]) -> None:
        """Remove the parameters of other ranks' stages, which the model no longer has, from the optimizers.

        Raises: ValueError: an optimizer that needs all parameters in one step, such as LBFGS.
        """
        own = set(self.model.parameters())
        for optimizer in optimizers:
            if updates_each(optimizer) == "model":
                raise ValueError(
                    f"`{type(optimizer).__name__}` computes each step from the gradients of all parameters, and a "
                    "rank has the gradients of its stages only. Use one that updates each by itself, such as AdamW."
                )
            index = {parameter: place for place, parameter in enumerate(dict.fromkeys(parameters_of(optimizer)))}
            groups = self.groups[optimizer] = list[_Group]()
            for group in optimizer.param_groups:
                indices = [index[parameter] for parameter in group["params"]]
                group["params"][:] = [parameter for parameter in group["params"] if parameter in own]
                groups.append(([index[parameter] for parameter in group["params"]], indices))
            for parameter in [each for each in optimizer.state if each not in own]:
                del optimizer.state[parameter]


@final
class PipelineState(StateAccess):
    """Each rank reads its stages, and describes the tensors of the other stages of its `line`, which has the ranks of
    the axis "pipeline". The ranks of the line with rank 0 hold the plain tensors of their stages.

    `inner`: reads the shards within a stage. `line`: the ranks of the axis "pipeline". `rank`: of this process.
    `keeps`: whether the line includes rank 0, which gathers.
    """

    def __init__(self, whole: WholeModel, inner: StateAccess, line: Collective, *, rank: int, keeps: bool) -> None:
        self.whole, self.inner, self.line, self.rank, self.keeps = whole, inner, line, rank, keeps

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        pieces = self._pieces(self.inner.read_module(module))
        return {name: pieces[name] for name in self.shapes(module) if name in pieces}

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        own = {name: content[name] for name in module.state_dict() if name in content}
        self.inner.write_module(module, own, strict=strict)

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...] | None]:
        path = next(name for name, part in self.whole.model.named_modules() if part is module)
        prefix = f"{path}." if path else ""
        return {name[len(prefix) :]: shape for name, shape in self.whole.shapes.items() if name.startswith(prefix)}

    def group_sizes(self, optimizer: Optimizer) -> list[int]:
        return [len(indices) for _, indices in self._groups(optimizer)]

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        content, groups = self.inner.read_optimizer(optimizer), self._groups(optimizer)
        flat = [index for kept, _ in groups for index in kept]
        whole = self._pieces({flat[place]: entries for place, entries in content["state"].items()})
        pairs = zip(content["param_groups"], groups, strict=True)
        described = [{**group, "params": indices} for group, (_, indices) in pairs]
        return {**content, "state": dict(sorted(whole.items())), "param_groups": described}

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        states, described, count = {}, [], 0
        for (kept, indices), saved in zip(self._groups(optimizer), content["param_groups"], strict=True):
            by_index = dict(zip(indices, saved["params"], strict=True))
            for place, index in enumerate(kept, start=count):
                if by_index[index] in content["state"]:
                    states[place] = content["state"][by_index[index]]
            described.append({**saved, "params": list(range(count, count + len(kept)))})
            count += len(kept)
        self.inner.write_optimizer(optimizer, {**content, "state": states, "param_groups": described})

    def _groups(self, optimizer: Optimizer) -> list[_Group]:
        if optimizer not in self.whole.groups:
            raise ValueError(
                f"This `{type(optimizer).__name__}` was made after `setup`, from the parameters of one rank's stages, "
                "so their indices in the unsplit model are not known. Make it before, and pass it to `fabric.setup` "
                "with the model."
            )
        return self.whole.groups[optimizer]

    def _pieces(self, mine: Mapping[Any, Any]) -> dict[Any, Any]:
        """The entries of all ranks of `line`, with tensors as `TensorShards`: the tensors of other stages have no
        values."""
        own = map_leaves(self._piece, dict(mine), is_leaf=_is_tensor)
        whole: dict[Any, Any] = {}
        for described in self.line.all_gather_object(map_leaves(_without_values, own, is_leaf=_is_tensor)):
            whole = {**described, **whole}
        return {**whole, **own}

    def _piece(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return replicated(value, (self.rank,)) if self.keeps else no_shards(value.shape, value.dtype)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, TensorShards))


def _without_values(value: Any) -> Any:
    return no_shards(value.shape, value.dtype) if isinstance(value, TensorShards) else value
