"""FairScale's FullyShardedDataParallel on the CPU, where as it is shipped it cannot run.

Two of its modules are loaded a second time, under names of their own, and see another `torch`: one whose `torch.cuda`
is `torch.cpu`, which has the same streams with nothing in them. FairScale's own modules, torch and the environment
stay as they are. What the copies do differently, and why:

- Streams and `synchronize` are those of the CPU; a CUDA stream cannot be made here.
- All-gather and reduce-scatter take lists: gloo refuses the flat forms that FairScale prefers.
- `Tensor.record_stream` has no kernel for the CPU, so the two methods that need it are written anew, without it.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@cache
def fully_sharded_on_cpu() -> type[Any]:
    """FairScale's class, able to run on CPU tensors over gloo. The same class at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        # FairScale uses it in every step; torch warns of the first use alone.
        torch.empty(0).storage()  # type: ignore[no-untyped-call]
    bucketer = _copy_of("fairscale.internal.reduce_scatter_bucketer")
    original = _copy_of("fairscale.nn.data_parallel.fully_sharded_data_parallel")
    original.torch = _TorchOnCPU("torch")
    original.ReduceScatterBucketer = bucketer.ReduceScatterBucketer
    for module in (original, bucketer):
        module.enable_nccl_base_collectives = False
    post, free, chunks = original.TrainingState.BACKWARD_POST, original.free_storage_, original.chunk_and_pad

    class FullyShardedOnCPU(original.FullyShardedDataParallel):  # type: ignore[misc, name-defined]
        """Without `Tensor.record_stream`, which has no CPU kernel: on the CPU no other stream runs."""

        def _free_full_params(self, params: list[Any] | None = None) -> None:
            self.has_full_params = False
            for param in self.params if params is None else params:
                free(param._full_param_padded)

        @torch.no_grad()
        def _post_backward_hook(self, param: Tensor, *unused: Any) -> None:
            """The gradient of a parameter is complete: let go of the whole parameter, and share the gradient out."""
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


class _TorchOnCPU(ModuleType):
    """`torch`, but for `torch.cuda`."""

    cuda = torch.cpu

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _copy_of(name: str) -> Any:
    """A module of FairScale loaded once more, in the same package, and not to be found by `import`."""
    found = find_spec(name)
    assert found is not None
    assert found.origin is not None
    spec = spec_from_file_location(f"{name}_on_cpu", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
