"""The largest batch size whose forward and backward fit into memory on every rank: `Fabric.find_batch_size`.

Each size is tried without messages between ranks (gradients are not synchronised), so a rank that runs out of memory
leaves no other in a collective; after it, the ranks agree. Where forward or backward cannot do without messages, it
raises before the first trial.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from fabric.loop.accumulation import Accumulation
from fabric.loop.setup import SetUp
from fabric.strategies.data.rng import preserved_rngs
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime


def find_batch_size(
    function: Callable[[int], object],
    objects: SetUp,
    accumulation: Accumulation,
    runtime: Runtime,
    start: int,
    most: int,
) -> int:
    """See `Fabric.find_batch_size`. Ranks: all."""
    if not 1 <= start <= most:
        raise ValueError(f"`find_batch_size(start={start}, most={most})`: write numbers with 1 <= start <= most.")
    models = tuple(objects.models.values())
    if runtime.world.size > 1:
        _refuse_messages(models)

    def fits(size: int) -> bool:
        with _undone(objects, runtime), accumulation.unsynced(models, objects.bare or None):
            found = _runs(function, size)
        for model in models:
            accumulation.kept.pop(model.module, None)
        return runtime.collective.reduce_boolean_decision(found)

    fitting, failing, size = 0, most + 1, start
    while failing - fitting > 1:
        if fits(size):
            fitting = size
        else:
            failing = size
        size = min(2 * fitting, most) if failing > most else max((fitting + failing) // 2, 1)
    if not fitting:
        raise torch.OutOfMemoryError(
            f"`find_batch_size`: batch size 1 does not fit into the memory of {runtime.world.size} ranks. Shard the "
            "model, recompute activations (`activation_checkpointing_policy`), or shorten the samples."
        )
    return fitting


def _runs(function: Callable[[int], object], size: int) -> bool:
    """Whether the function runs with this batch size. What it has allocated is given back."""
    try:
        function(size)
    except (MemoryError, RuntimeError) as error:  # `torch.OutOfMemoryError` is a RuntimeError
        if not _is_of_memory(error):
            raise
        is_fitting = False
    else:
        is_fitting = True
    gc.collect()  # the frames of an exception may be in reference cycles
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return is_fitting


def _is_of_memory(error: BaseException) -> bool:
    words = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
    is_named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_named or any(each in str(error) for each in words)


@contextmanager
def _undone(objects: SetUp, runtime: Runtime) -> Iterator[None]:
    """Context: gradients, buffers, generators and the positions of loaders are as before when it ends. Steps raise."""
    modules = [model.module for model in objects.models.values()]
    parameters = {each for module in modules for each in module.parameters()}
    gradients = [(each, each.grad) for each in parameters]
    buffers = [(each, each.detach().clone()) for module in modules for each in module.buffers()]
    loaders = [loader for each in objects.loaders if (loader := each()) is not None]
    positions = [(loader.iteration, loader.state_dict()) for loader in loaders]
    progress = runtime.loop_progress
    counted = progress.num_backwards, progress.num_unweighted
    with ExitStack() as stack:
        stack.enter_context(runtime.divergence.postponed())
        stack.enter_context(preserved_rngs())
        for optimizer in objects.optimizers:
            stack.callback(optimizer.register_step_pre_hook(_refuse_step).remove)
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for buffer, value in buffers:
                buffer.copy_(value)
    progress.num_backwards, progress.num_unweighted = counted
    for loader, (iteration, position) in zip(loaders, positions, strict=True):
        if loader.iteration is not iteration:
            loader.load_state_dict(position)


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise RuntimeError(
        f"`{type(optimizer).__name__}.step()` within `find_batch_size`, which leaves the model as it is: call the "
        "model and `fabric.backward` alone. What the optimizer's states take comes on top, at its first step."
    )


def _refuse_messages(models: Sequence[Prepared]) -> None:
    """Raise ValueError if a rank that runs out of memory would leave the others in a collective."""
    for model in models:
        if model.layout.forward_communicates or model.scale_loss is not None:
            raise ValueError(
                f"`find_batch_size` with a `{type(model.module).__name__}` whose forward or backward sends "
                "messages, as under `strategy='fsdp'` and DeepSpeed: a rank that runs out of memory would leave the "
                "others in one. Find the size on one device (`devices=1`), or pass `strategy='ddp'`."
            )
