"""FairScale's FullyShardedDataParallel on the CPU, which the released class does not support.

Two of its modules are loaded a second time, with another `torch`, whose `torch.cuda` is `torch.cpu`: that has the same
stream functions, which do nothing. FairScale's own modules, torch and the environment are not changed. All-gather and
reduce-scatter take lists there: gloo refuses the flat forms that FairScale prefers.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@cache
def fully_sharded_on_cpu() -> type[Any]:
    """FairScale's class for CPU tensors and gloo. Returns the same class at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        # FairScale uses it in every step; torch warns only of the first use.
        torch.empty(0).storage()  # type: ignore[no-untyped-call]
    bucketer = _copy_of("fairscale.internal.reduce_scatter_bucketer")
    original = _copy_of("fairscale.nn.data_parallel.fully_sharded_data_parallel")
    original.ReduceScatterBucketer = bucketer.ReduceScatterBucketer
    original.torch = ModuleType("torch")
    vars(original.torch).update({**vars(torch), "cuda": torch.cpu})
    post, free, chunks = original.TrainingState.BACKWARD_POST, original.free_storage_, original.chunk_and_pad

    class FullyShardedOnCPU(original.FullyShardedDataParallel):  # type: ignore[misc, name-defined]
        """Without `Tensor.record_stream`, which has no CPU kernel: on the CPU no other stream runs."""

        def _free_full_params(self, params: list[Any] | None = None) -> None:
            self.has_full_params = False
            for param in self.params if params is None else params:
                free(param._full_param_padded)

        @torch.no_grad()
        def _post_backward_hook(self, param: Tensor, *unused: Any) -> None:
            """Called when a gradient is complete: frees the unsharded parameter, and reduce-scatters the gradient."""
            self.training_state = post
            gradient = param.grad
            if gradient is None:
                return
            if self._require_backward_grad_sync or self.reshard_after_forward:
                self._free_full_params([param])
            self._use_fp32_param_shard([param])
            if self._require_backward_grad_sync:
                param.grad = None
                gradient.div_(self.gradient_predivide_factor)
                with torch.cpu.stream(self._streams["post_backward"]):
                    self._reducer.reduce_scatter_async(
                        chunks(gradient, self.world_size),
                        group=self.process_group_reduce_scatter,
                        callback_fn=partial(self._post_reduction_hook, param),
                    )

    return FullyShardedOnCPU


def _copy_of(name: str) -> Any:
    """Load a module of FairScale again, without adding it to `sys.modules`."""
    spec: Any = find_spec(name)
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.enable_nccl_base_collectives = False
    return module
