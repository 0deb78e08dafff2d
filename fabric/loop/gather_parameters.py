"""Whole parameters of a model, read or written outside of its forward, under every strategy: `Fabric.gathered`."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from fabric.configure.method_arguments import refuse_writing
from fabric.strategies.checkpoint.state import PLAIN
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.module.deepcopy import user_hooks_alone
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.prepared import Prepared, with_precision
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.digest import numbers_of
from fabric.strategies.tensors.dtensor import as_sharded


@contextmanager
def gathered(
    module: nn.Module, prepared: Prepared | None, ranks: Collective, *, is_alike: bool, write: bool
) -> Iterator[None]:
    """See `Fabric.gathered`. Ranks: all, with the same module.

    `prepared`: the model that contains the module, if one does. `is_alike`: whether all ranks hold the same plain
    parameters, so that values that are written into them are compared, too.
    """
    names = {"model": type(module).__name__}
    if write and prepared is not None:
        present = set(prepared.module.parameters())
        if any(as_sharded(each) is not None and each not in present for each in prepared.sync.parameters_held()):
            raise RuntimeError(_NOT_RESHARDED.format(**names))
    access = PLAIN if prepared is None else prepared.state
    parameters = [each for each in module.parameters() if isinstance(each, nn.Parameter)]  # no copy of an outer context
    with torch.set_grad_enabled(torch.is_grad_enabled() and not write):
        whole = [(each, copy) for each in parameters for copy in access.gather([each])]
    copies = {each: copy for each, copy in whole if copy is not each}
    if write:  # leaves of the graph, as they are in one process
        copies = {each: nn.Parameter(copy.detach(), each.requires_grad) for each, copy in copies.items()}
    places = [_Place(part, copies) for part in module.modules()]
    versions = [copy._version for copy in copies.values()]
    hooks = [hook for place in places if write and place.has_dtensors for hook in place.hooks()]
    for place in places:
        place.put(1)
    try:
        yield
        replaced = [
            name for each in places for name, (_, copy) in each.own.items() if each.present.get(name) is not copy
        ]
        alike = {*copies.values(), *(module.parameters() if is_alike else ())}
        written = {name: each for name, each in module.named_parameters() if each in alike}
    finally:
        for place in places:
            place.put(0)
        for hook in hooks:
            hook.remove()
    if not write:
        if versions != [copy._version for copy in copies.values()]:
            raise RuntimeError(_WRITTEN.format(**names))
        return
    if replaced:
        raise RuntimeError(_REPLACED.format(name=replaced[0], **names))
    if prepared is not None:
        mine = dict(zip(written, numbers_of(written.values()), strict=True))
        for rank, theirs in enumerate(ranks.all_gather_object(mine)):  # in a pipeline each has some of the names
            if differing := [name for name, digest in theirs.items() if mine.get(name, digest) != digest]:
                raise RuntimeError(_DIFFERENT.format(name=differing[0], rank=rank, other=ranks.rank, **names))
    with torch.no_grad():
        access.scatter(list(copies), list(copies.values()))


@final
class _Place:
    """The parameters of one module that have copies, by name: each with its copy."""

    def __init__(self, part: nn.Module, copies: Mapping[Any, Tensor]) -> None:
        self.part, self.present = part, cast(dict[str, Any], part._parameters)
        self.own = {name: (each, copies[each]) for name, each in self.present.items() if each in copies}
        self.has_dtensors = any(as_sharded(each) is not None for each, _ in self.own.values())

    def put(self, which: int) -> None:
        """0: the parameters, 1: the copies."""
        self.present.update({name: pair[which] for name, pair in self.own.items()})

    def hooks(self) -> tuple[Any, Any]:
        """Let `load_state_dict` load into the copies: hooks of `fully_shard` expect to find shards after it."""
        before = self.part.register_load_state_dict_pre_hook(self._load)  # type: ignore[no-untyped-call]
        return before, self.part.register_load_state_dict_post_hook(lambda *_: self.put(1))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _load(self, part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.put(0)
        for name, (each, copy) in self.own.items():
            given = state.get(prefix + name)
            if isinstance(given, Tensor) and given.shape == copy.shape:
                copy.copy_(given)
                state[prefix + name] = each


@contextmanager
def gathered_for_forward(
    module: nn.Module, prepared: Prepared | None, runtime: Runtime, *, write: bool
) -> Iterator[None]:
    """See `Fabric.gathered`: the module runs the user's own code and hooks, and the precision's, without messages."""
    refuse_writing(write)
    access = PLAIN if prepared is None else prepared.state
    if len(access.shapes(module)) > len(PLAIN.shapes(module)):
        raise ValueError(_IN_STAGES.format(model=type(module).__name__))
    with ExitStack() as stack:
        with torch.inference_mode(False), torch.no_grad():
            stack.enter_context(gathered(module, prepared, runtime.collective, is_alike=False, write=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(user_hooks_alone(module))
        for part in module.modules():
            path = vars(part).get("mark_forward_method")
            if isinstance(path, ForwardPath):
                is_model = prepared is not None and path is prepared.path
                stack.callback(path.bypass(with_precision(runtime, None) if is_model else None))
        yield


_IN_STAGES = (
    "`fabric.gathered(model, for_forward=True)`: this rank has some of the layers of `{model}`, as in a pipeline, and "
    "cannot run it. Send `fabric.weights(model)` to a model that is not split, and generate with that."
)
_WRITTEN = (
    "A parameter of `{model}` was changed within `fabric.gathered`, where it is a copy of the weight in shards: the "
    "change is lost. Write `with fabric.gathered(model, write=True):`, on every rank."
)
_DIFFERENT = (
    "`fabric.gathered(model, write=True)` ended with values of `{name}` of `{model}` on rank {rank} that differ from "
    "those on rank {other}. Every rank writes the same values: compute them alike, or send those of rank 0, "
    "`mask = fabric.broadcast(mask)`."
)
_REPLACED = (
    "`{name}` of `{model}` was removed or replaced within `fabric.gathered(model, write=True)`, as by "
    "`torch.nn.utils.prune`. Prune before `fabric.setup`, or write in place after each step, `weight.mul_(mask)`."
)
_NOT_RESHARDED = (
    "`fabric.gathered(model, write=True)` between forward and backward of `{model}`, whose parameters are still "
    "gathered (`reshard_after_forward`): what is written would be lost. Write after `fabric.backward`."
)
