"""How `ddp` reduces gradients: rounded to half precision, as low-rank factors, or by the user's function.

A hook replaces the all-reduce of torch's DistributedDataParallel, bucket by bucket, while backward runs. The optimizer
then sees the hook's gradients, which no longer equal those of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

_WORDS = ("bf16", "fp16")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Gradients of matrices are sent as two low-rank factors; the error is added to the next gradients. The error is
    kept on each rank and not saved: a resumed run starts without it.
    Source: Vogels et al., NeurIPS 2019; torch's `powerSGD_hook`.
    """

    matrix_approximation_rank: int = 1
    """For an n x m matrix, rank * (n + m) numbers are sent. Larger: closer to the true gradients."""
    start_step: int = 1000
    """Gradients are all-reduced uncompressed before this step. At least 2: the buckets change after the first."""
    min_compression_rate: float = 2.0
    """A matrix that would not shrink by this factor is sent uncompressed."""


TorchHook: TypeAlias = Callable[[Any, Any], Future[Tensor]]
"""`(state, bucket)`, with a `torch.distributed.GradBucket`: returns a Future of the reduced gradients."""
CommHook: TypeAlias = Literal["bf16", "fp16"] | PowerSGD | TorchHook


def check(hook: Any) -> None:
    """Raise ValueError or TypeError if `hook` is not a communication hook."""
    if isinstance(hook, str) and hook not in _WORDS:
        raise ValueError(f"`comm_hook={hook!r}` names no hook. Write {' or '.join(map(repr, _WORDS))}.")
    if not isinstance(hook, (str, PowerSGD, type(None))) and not callable(hook):
        raise TypeError(
            f"`comm_hook={hook!r}` is a `{type(hook).__name__}`. Write 'bf16', 'fp16', `PowerSGD(...)`, or a function "
            "`(state, bucket)` as torch's `register_comm_hook` takes it; `state` is None."
        )


def why_not(hook: CommHook | None, backend: str) -> str | None:
    """None if the hook works; otherwise an error message that says what to write."""
    if isinstance(hook, PowerSGD) and backend == "gloo":
        # It issues collectives from callbacks, which gloo's threads run in a different order on each rank: the process
        # aborts on messages of different lengths (torch 2.13, 3 of 3 runs). A single rank aborts, too, though
        # rarely: where such a callback runs while the process group ends.
        return (
            "`comm_hook=PowerSGD(...)` over gloo ends the process: the ranks send their factors in different orders. "
            "Run on CUDA, where NCCL keeps the order, or write `comm_hook='bf16'`."
        )
    return None


def register(parallel: DistributedDataParallel, hook: CommHook) -> None:
    """Reduce gradients by `hook` from the next backward on."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state: Any = None
    if isinstance(hook, PowerSGD):
        called: TorchHook = powerSGD_hook.powerSGD_hook
        state = powerSGD_hook.PowerSGDState(
            parallel.process_group,
            matrix_approximation_rank=hook.matrix_approximation_rank,
            start_powerSGD_iter=hook.start_step,
            min_compression_rate=hook.min_compression_rate,
        )
    elif isinstance(hook, str):
        called = default_hooks.bf16_compress_hook if hook == "bf16" else default_hooks.fp16_compress_hook
        state = parallel.process_group
    else:
        called = hook

    # A function of ours: torch refuses annotations that are strings, and its `bf16_compress_hook` over gloo.
    def reduce_bucket(state, bucket):  # type: ignore[no-untyped-def]
        return called(state, bucket)

    parallel.register_comm_hook(state, reduce_bucket)
