"""What a parameter holds while DeepSpeed has released it, at ZeRO stage 3 between forwards: a placeholder that shows
whether the program has written to it.

DeepSpeed leaves an empty tensor, in which a write through `.data` leaves no trace. A placeholder has three or four
elements: a negative number, a positive number, and NaN. Each forward has new numbers, so a program that writes back the
numbers it has read earlier is found, too. The numbers are compared only if torch has copied the placeholder, which it
does at the first write and when the address is read (`Tensor.data_ptr` in torch's documentation). In all other forwards
the host waits for no device.

A placeholder's shape differs from the parameter's, so the backward of a penalty on a released parameter fails.
Placeholders of one shape share memory, as empty tensors have one address: `nn.RNN.flatten_parameters` then leaves
weights as they are.

Before `setup`, a parameter of a model made within `fabric.init_module`, which is sharded as soon as it is made, has its
unsharded shape, over one element of memory that is NaN (`in_shards`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import nan
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fabric.launchers.private_names import TESTED_TORCH, Names, require
from fabric.strategies.deepspeed.library import with_environment
from fabric.strategies.module.initialization import initialised_by
from fabric.strategies.module.model_checks import refuse_different_models
from fabric.strategies.runtime import Runtime
from fabric.strategies.torch_internals import disable_dynamo

COPY_ON_WRITE: Names = {
    "torch": {"_lazy_clone": "a tensor that is copied when it is first written: torch documents it at `data_ptr`"},
    "torch._C": {"_is_cow_tensor": "whether it was written"},
}


def is_sharded(tensor: Tensor) -> bool:
    """Whether DeepSpeed has sharded the parameter: at stage 3, or if it was constructed within `init_module`."""
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

    return bool(is_zero_param(tensor))


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """The unsharded shape of the parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@final
class ReleasedParameters:
    """The parameters of a module that DeepSpeed gathers and releases, and their placeholders; none at stages 1 and 2.

    Ranks: each on its own, except for `gathered`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[Tensor, str] = {each: name for name, each in module.named_parameters()}
        self._versions = {each: each._version for each in self._names}
        self._model = type(module).__name__
        self._kinds: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for each in self._names:
            shape = shape_of(each)
            if is_sharded(each) and each.is_floating_point() and 0 not in shape:
                self._kinds[4 if shape[-1:] == (3,) else 3, each.dtype, each.device].append(each)
        if self._kinds:
            require("torch", TESTED_TORCH, COPY_ON_WRITE)
        self._number = 1
        self._signs = {
            (size, dtype, device): torch.tensor([-1, 1, nan, nan][:size], dtype=dtype, device=device)
            for size, dtype, device in self._kinds
        }
        self._written = {kind: torch._lazy_clone(signs) for kind, signs in self._signs.items()}
        self.placeholders: dict[Tensor, Tensor] = {}
        self.refuse_changes()
        self._hooks = []
        if any(each in self.placeholders for each in module.parameters(recurse=False)):  # released after `forward`
            fill = disable_dynamo(lambda *_: self.fill())
            self._hooks.append(module.register_forward_hook(fill, always_call=True))

    def fill(self, parameters: Iterable[Tensor] = ()) -> None:
        """Put placeholders into the parameters (default: all) that DeepSpeed has left empty."""
        for parameter in parameters or self.placeholders:
            if not parameter.numel() and parameter in self.placeholders:
                parameter.data = self.placeholders[parameter]

    def close(self) -> None:
        """Remove the hook, and leave empty tensors, as DeepSpeed does."""
        for hook in self._hooks:
            hook.remove()
        self.empty()

    def empty(self) -> None:
        """Leave empty tensors in place of placeholders."""
        for parameter, placeholder in self.placeholders.items():
            if parameter.is_set_to(placeholder):
                parameter.data = placeholder.new_empty(0)

    def refuse_changes(self) -> None:
        """Raise RuntimeError if the program has written to a placeholder, or has replaced one, since the last forward.

        Then sets placeholders with new numbers, except in inference mode. Call it before a forward.
        """
        for kind, placeholder in self._written.items():
            is_copied, signs = not torch._C._is_cow_tensor(placeholder), self._signs[kind][:2]  # type: ignore[attr-defined]
            if is_copied and not torch.equal(placeholder[:2], signs * self._number):
                known = (f"`{self._names[each]}`" for each, was in self._versions.items() if each._version != was)
                name = next(known, f"A parameter of `{self._model}`")  # `.data` has its own version counter
                raise RuntimeError(LOST.format(name=name, how="changed in place"))
            for parameter in self._kinds[kind]:
                if not parameter.is_set_to(placeholder) and parameter.numel() and _is_released(parameter):
                    name = f"`{self._names[parameter]}`"
                    raise RuntimeError(LOST.format(name=name, how="assigned through `.data`"))
        if torch.is_inference_mode_enabled():  # parameters would become inference tensors
            return
        self._number = self._number % 251 + 1  # which bfloat16 represents
        for kind, parameters in self._kinds.items():
            new = torch._lazy_clone(self._signs[kind] * self._number)
            for parameter in parameters:
                if not parameter.numel() or parameter.is_set_to(self._written[kind]):
                    parameter.data = new
                self.placeholders[parameter] = new
            self._written[kind] = new

    @contextmanager
    def gathered(self, parameters: Sequence[Tensor], *, modifier_rank: int | None = None) -> Iterator[None]:
        """Context: the sharded ones among the parameters are gathered. Ranks: all.

        `modifier_rank`: the rank whose changes are kept; None: the parameters are not changed.
        """
        from deepspeed.runtime.zero import GatheredParameters

        sharded = list(filter(is_sharded, parameters))
        with GatheredParameters(sharded, modifier_rank=modifier_rank, enabled=bool(sharded)):
            yield
        self.fill(sharded)


def _is_released(parameter: Any) -> bool:
    return parameter.ds_status.name == "NOT_AVAILABLE"  # type: ignore[no-any-return]


LOST = (
    "{name} was {how}, but at ZeRO stage 3 a weight has no values between forwards, and is a copy in forward: the "
    "change is lost. Write it on every rank within `with fabric.gathered(model, write=True):`, and read weights within "
    "`with fabric.gathered(model):`."
)


@contextmanager
def in_shards(runtime: Runtime, config: Mapping[str, Any]) -> Iterator[None]:
    """Context: each parameter is sharded as soon as it is made, with rank 0's values, also in a copy of a module.

    DeepSpeed leaves an empty tensor in a sharded parameter. Until `hide_shapes` the parameter has its unsharded shape
    instead, over one element of memory, which is NaN: programs read shapes to make parameter groups and to count
    weights. Ranks: all.
    """
    with with_environment(runtime.world, runtime.device.type) as deepspeed:

        class ShardSameParameters(deepspeed.zero.Init):  # type: ignore[misc, name-defined]
            def _post_init_method(self, module: nn.Module) -> None:
                if module._parameters:  # DeepSpeed broadcasts parameters by position
                    refuse_different_models(runtime, module, "construction of", recurse=False)
                super()._post_init_method(module)
                for parameter in module.parameters(recurse=False):
                    _show_shape(parameter)

            def _partition_param(self, param: Any, *args: Any, **kwargs: Any) -> None:
                super()._partition_param(param, *args, **kwargs)
                if _shows_shape(param):  # it was gathered, and is sharded again
                    _show_shape(param)

        # Without `dtype`: on a device without float16, release 0.19 uses bfloat16 for any dtype that is passed.
        shard = ShardSameParameters(config_dict_or_path=config, mem_efficient_linear=False)
    with shard, _WholeInitialization():
        yield


def hide_shapes(module: nn.Module) -> None:
    """Make sharded parameters empty tensors again, as DeepSpeed's engine expects."""
    for parameter in filter(_shows_shape, module.parameters()):
        del parameter.__deepcopy__
        parameter.data = parameter.data.new_empty(0)


def _show_shape(parameter: Any) -> None:
    value = float("nan") if parameter.is_floating_point() else 0
    parameter.data = torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.ds_shape)
    parameter.__deepcopy__ = partial(_copy_of, parameter)


def _shows_shape(parameter: Any) -> bool:
    return "__deepcopy__" in vars(parameter)


def _copy_of(parameter: Any, memo: dict[int, Any]) -> nn.Parameter:
    """A copy of a sharded parameter, sharded too: `nn.TransformerEncoder` copies its layer. Ranks: all."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        copy = memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    parameter.convert_to_zero_parameters([copy])
    _show_shape(copy)
    return copy


@final
class _WholeInitialization(TorchFunctionMode):
    """Within the context, a function that initialises a sharded parameter initialises the whole parameter.

    DeepSpeed shards a submodule's parameters when the submodule is made. If the model then sets a parameter to zeros,
    the shards would keep their former values. Ranks: all make the same calls; the values are those of rank 0.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from deepspeed.runtime.zero import GatheredParameters

        parameter = initialised_by(function, args, kwargs or {})
        if parameter is None or not is_sharded(parameter):
            return function(*args, **(kwargs or {}))
        with GatheredParameters([parameter], modifier_rank=0):
            return function(*args, **(kwargs or {}))
