"""The largest batch size whose forward and backward fit into memory on every rank: `Fabric.find_batch_size`.

Each size is tried without messages between ranks: collectives are answered on each rank alone (`answered_alone`), so a
rank that runs out of memory leaves no other in one; after it, the ranks agree. What a forward or backward that was cut
short leaves behind is undone by the model's `GradientSync.rehearsal`.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.loop.setup import SetUp
from fabric.strategies.accelerators.accelerator_registry import device_rngs, make_accelerator
from fabric.strategies.collectives.answered_alone import answered_alone
from fabric.strategies.data.rng import preserved_rngs


def find_batch_size(function: Callable[[int], object], objects: SetUp, start: int, most: int) -> int:
    """See `Fabric.find_batch_size`. Ranks: all."""
    if not 1 <= start <= most:
        raise ValueError(f"`find_batch_size(start={start}, most={most})`: write numbers with 1 <= start <= most.")
    models, world, collective = [*objects.models.values()], objects.runtime.world, objects.runtime.collective
    if make_accelerator(objects.runtime.device.type).is_recorded:
        raise ValueError(
            "`find_batch_size` over XLA, which records a trial and runs it later: try each size in a run of its own."
        )
    if any(each.grad is not None for each in _parameters(objects)):
        raise ValueError(_PRESENT)
    group = collective.process_group if world.size > 1 else None

    def fits(size: int) -> bool:
        with ExitStack() as stack:
            stack.enter_context(_undone(objects))
            if group is not None:
                stack.enter_context(answered_alone(group))
            stack.enter_context(objects.accumulation.unsynced(models, objects.bare or None, rehearses=True))
            found = _runs(function, size)
        return collective.reduce_boolean_decision(found)

    fitting, failing, size = 0, most + 1, start
    while failing - fitting > 1:
        fitting, failing = (size, failing) if fits(size) else (fitting, size)
        size = min(2 * fitting, most) if failing > most else max((fitting + failing) // 2, 1)
    if not fitting:
        raise torch.OutOfMemoryError(
            f"`find_batch_size`: batch size 1 does not fit into the memory of {world.size} ranks. Shard the "
            "model, recompute activations (`activation_checkpointing_policy`), or shorten the samples."
        )
    return fitting


def _runs(function: Callable[[int], object], size: int) -> bool:
    """Whether the function runs with this batch size. What it has allocated is given back."""
    is_fitting = True
    try:
        function(size)
    except (MemoryError, RuntimeError) as error:  # `torch.OutOfMemoryError` is a RuntimeError
        is_fitting = False
        is_named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_named and not any(words in str(error) for words in _OF_MEMORY):
            raise
    gc.collect()  # the frames of an exception may be in reference cycles
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return is_fitting


@contextmanager
def _undone(objects: SetUp) -> Iterator[None]:
    """Context: there are no gradients when it ends, and buffers, generators and the positions of loaders are as before.
    Steps raise."""
    buffers = [(each, each.detach().clone()) for module in objects.models for each in module.buffers()]
    loaders = [loader for each in objects.loaders if (loader := each()) is not None]
    positions = [(loader.iteration, loader.state_dict()) for loader in loaders]
    runtime, progress = objects.runtime, objects.runtime.loop_progress
    counted, is_weighted = (progress.num_backwards, progress.num_unweighted), objects.weighting.is_used
    with ExitStack() as stack:
        stack.enter_context(runtime.divergence.postponed())
        stack.enter_context(preserved_rngs(device_rngs(runtime.devices)))
        for optimizer in objects.optimizers:
            stack.callback(optimizer.register_step_pre_hook(_refuse_step).remove)
        try:
            yield
        finally:
            for parameter in _parameters(objects):
                parameter.grad = None
            for buffer, value in buffers:
                buffer.copy_(value)
    objects.accumulation.kept.clear()
    objects.weighting.kept_back.clear()
    objects.weighting.is_used = is_weighted  # a rank may have seen none in a trial
    progress.num_backwards, progress.num_unweighted = counted
    for loader, (iteration, position) in zip(loaders, positions, strict=True):
        if loader.iteration is not iteration:
            loader.load_state_dict(position)


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise RuntimeError(
        f"`{type(optimizer).__name__}.step()` within `find_batch_size`, which leaves the model as it is: call the "
        "model and `fabric.backward` alone. What the optimizer's states take comes on top, at its first step."
    )


def _parameters(objects: SetUp) -> Iterator[Tensor]:
    for sync in (*(model.sync for model in objects.models.values()), objects.bare):
        yield from sync.parameters_held()


_OF_MEMORY = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Words in errors of torch's allocators and of libraries that allocate."""
_PRESENT = (
    "`find_batch_size` while parameters have gradients: a trial has gradients of its own. Call it before the first "
    "`fabric.backward` of a step, or after `optimizer.zero_grad()`, which sets gradients to None."
)
