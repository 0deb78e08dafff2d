"""Models made within `fabric.init_module` at ZeRO stage 3, whose parameters are sharded as soon as they are made."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fabric.strategies.deepspeed.library import with_environment
from fabric.strategies.deepspeed.released import is_sharded
from fabric.strategies.module.initialization import initialised_by
from fabric.strategies.module.model_checks import refuse_different_models
from fabric.strategies.runtime import Runtime


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
