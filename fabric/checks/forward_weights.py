"""Whether forward of a sharded model reads the weights that its parameters have, in the steps that are watched.

`fully_shard` gathers the parameters that it knows before the forward of each module, and frees these copies after it.
So values that forward changes are lost, hooks of the parameters do not run, and parameters that were replaced, by an
assignment or for the time of a `torch.func.functional_call`, are not read.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.checks.agreement import SanitizerError
from fabric.strategies.tensors.dtensor import as_sharded, local_part, own_part


@final
class ForwardWeights:
    """Hooks on the modules of one model: before the first forward hook of `fully_shard`, and before its last."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[nn.Module, dict[str, Tensor]] = {}
        """The parameters before forward, by their module and name."""
        self._hooks: list[RemovableHandle] = []

    def attach(self) -> None:
        """Compare in each forward from the next one on. Nothing to do for a model without shards."""
        if not self._hooks and any(as_sharded(parameter) is not None for parameter in self._model.parameters()):
            self._hooks = [
                each.register_forward_hook(partial(self._compare, place), prepend=True)
                for place, each in self._model.named_modules()
            ]
            self._hooks.append(self._model.register_forward_pre_hook(self._note, prepend=True))

    def remove(self) -> None:
        """Compare no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._before.clear()

    def _note(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # a backend that leaves no trace in the graph of the loss
            return
        self._before = {module: dict(module.named_parameters(recurse=False)) for module in model.modules()}

    def _compare(self, place: str, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            with torch.no_grad():
                self._compare_parameters(place, module)

    def _compare_parameters(self, place: str, module: nn.Module) -> None:
        before = self._before.get(module, {})
        for name, gathered in module.named_parameters(recurse=False):
            parameter = before.get(name, gathered)
            if parameter is gathered:
                continue
            names = {"name": f"{place}.{name}".removeprefix("."), "model": type(self._model).__name__}
            if parameter._backward_hooks:
                raise SanitizerError(_HOOKED.format(**names))
            sharded = as_sharded(parameter)
            if sharded is not None:
                own = own_part(gathered, sharded)
                expected = local_part(sharded).to(own.device, own.dtype)
                if torch.allclose(own, expected, rtol=0, atol=0, equal_nan=True):
                    continue
            raise SanitizerError(_DIFFERS.format(**names))


_DIFFERS = (
    "Forward of `{model}` ended with values of `{name}` that its parameter does not have. A sharded model computes "
    "with gathered copies: what `forward` changes in them is lost, and a parameter that was replaced, also by "
    "`torch.func.functional_call`, is not read. Change values in place between steps, or pass `strategy='ddp'`."
)
_HOOKED = (
    "`{name}` of `{model}` has a hook by `register_hook`, which runs in no backward: a sharded model computes with "
    "gathered copies. Change gradients before `optimizer.step()`, or use `register_post_accumulate_grad_hook`, which "
    "gets this rank's shard of the averaged gradient."
)
