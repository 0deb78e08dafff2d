"""Checks, in watched steps, that forward of a sharded model computes with the values of its parameters.

The parameters of each unit are gathered before its forward, and these copies are freed after it. So values that forward
changes are lost, hooks of DTensors do not run, and parameters that were replaced, by an assignment or for the time of a
`torch.func.functional_call`, are not read.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.checks.agreement import SanitizerError
from fabric.checks.training_state import Parameters
from fabric.strategies.module.deepcopy import Hook
from fabric.strategies.prepared import Prepared
from fabric.strategies.sharding.fully_shard import fsdp_modules
from fabric.strategies.tensors.dtensor import user_class
from fabric.strategies.tensors.parameters import uncompiled


@final
class WatchedModel:
    """A model that the sanitizer compares, and the hooks on its units: before the first forward hook of the backend,
    and before its last. The model keeps it alive."""

    def __init__(self, model: Prepared) -> None:
        self.prepared = model
        self.parameters: Parameters = dict(model.module.named_parameters(remove_duplicate=False))
        """As they were set up."""
        self._access, self._model = model.state, uncompiled(model.module)
        self._units = [*(model.sync.units or fsdp_modules(self._model))]
        self._before: dict[nn.Module, dict[str, Tensor]] = {}
        """The parameters before forward, by their module and name."""
        self._hooks: list[RemovableHandle] = []

    def attach(self) -> None:
        """Compare in each forward from the next one on. Does nothing for a model without shards."""
        if self._units and not self._hooks:
            self._hooks = [each.register_forward_hook(Hook(self._compare), prepend=True) for each in self._units]
            self._hooks.append(self._model.register_forward_pre_hook(Hook(self._note), prepend=True))

    def remove(self) -> None:
        """Stop comparing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._before.clear()

    def _note(self, model: nn.Module, args: Any) -> None:
        self._before = {module: dict(module.named_parameters(recurse=False)) for module in model.modules()}

    @torch.no_grad()
    def _compare(self, unit: nn.Module, args: Any, output: Any) -> None:
        for part in unit.modules():
            before = self._before.get(part, {})
            for name, gathered in part.named_parameters(recurse=False):
                parameter = before.get(name, gathered)
                kept = self._access.kept(parameter, gathered)
                is_hooked = parameter is not gathered and parameter._backward_hooks
                is_read = parameter is gathered if kept is None else torch.allclose(*kept, 0, 0, equal_nan=True)
                if is_hooked or not is_read:
                    place = next((place for place, each in self._model.named_modules() if each is part), "")
                    names = {"name": f"{place}.{name}".lstrip("."), "model": user_class(self._model).__name__}
                    raise SanitizerError((_HOOKED if is_hooked else _DIFFERS).format(**names))


_DIFFERS = (
    "Forward of `{model}` ended with values of `{name}` that differ from its parameter. A sharded model computes "
    "with gathered copies: what `forward` changes in them is lost, and a parameter that was replaced, also by "
    "`torch.func.functional_call`, is not read. For weights that are taken from the first batch, run one forward "
    "before `fabric.setup`; change others between steps, within `fabric.gathered(model, write=True)`; or pass "
    "`strategy='ddp'`."
)
_HOOKED = (
    "`{name}` of `{model}` has a hook by `register_hook`, which runs in no backward: a sharded model computes with "
    "gathered copies. Change gradients before `optimizer.step()`, or use `register_post_accumulate_grad_hook`, which "
    "gets this rank's shard of the averaged gradient."
)
