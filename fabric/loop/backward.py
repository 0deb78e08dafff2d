"""`Fabric.backward`: the loss scale, weights and repeated batches, the synchronisation, and the moments of the checks.

Which function computes the gradients depends on the models that are set up, and is chosen when one is.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn

from fabric.checks.check import Moments
from fabric.loop.accumulation import Accumulation
from fabric.loop.setup import SetUp
from fabric.loop.weighting import Weight, Weighting, check_weight
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.gradients.sync import backward_through
from fabric.strategies.precision.precision import casts
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime


@final
class LossBackward:
    """The backward of the losses of one fabric. Exists while it is connected."""

    def __init__(
        self, runtime: Runtime, set_up: SetUp, accumulation: Accumulation, weighting: Weighting, moments: Moments
    ) -> None:
        self._runtime, self._set_up, self._moments = runtime, set_up, moments
        self._accumulation, self._weighting = accumulation, weighting
        self._of_all: Callable[..., None] = _no_model

    def models_changed(self) -> None:
        """Called once models or optimizers were set up: the next loss may go through all models that are known."""
        models = list(self._set_up.models.values())
        joins = len(models) == 1 or all(model.joins_backward for model in models)
        is_empty = not models and not self._set_up.optimizers
        self._of_all = _no_model if is_empty else self._through(models) if joins else self._of_one

    def run(
        self,
        loss: Tensor,
        model: nn.Module | Sequence[nn.Module] | None,
        weight: Weight | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """See `Fabric.backward`."""
        if not isinstance(loss, Tensor):
            raise TypeError(_NO_TENSOR.format(type(loss).__name__))
        runtime, accumulation, moments = self._runtime, self._accumulation, self._moments
        progress, is_synchronised = runtime.loop_progress, not accumulation.held
        named, backward = ([], self._of_all) if model is None else self._of_named(model)
        progress.num_backwards += 1
        for moment in moments.before_backward:
            moment(loss, is_synchronised)
        factor = progress.repeated.factor()
        moments.is_in_backward = True
        try:
            if weight is None:
                progress.num_unweighted += 1
                if self._weighting.kept_back:
                    self._weighting.note_unweighted()
                backward(loss if factor == 1 else loss * factor, *args, **kwargs)
            else:  # a batch that is repeated has the weight zero
                counted, weight = (loss, check_weight(weight)) if factor else (loss * 0, 0.0 * check_weight(weight))
                self._run_weighted(partial(backward, counted, *args, **kwargs), named, weight)
        except (AssertionError, RuntimeError) as error:
            if isinstance(error, CollectiveError | torch.OutOfMemoryError):
                raise
            known = (sentence for words, sentence in _EXPLAINED.items() if words in str(error))
            sentence = next(known, _REENTRANT if _goes_through(loss, "CheckpointFunctionBackward") else None)
            if sentence is None:
                raise
            raise RuntimeError(f"Backward failed: {type(error).__name__}: {error}\n{sentence}") from error
        finally:
            moments.is_in_backward = False
        if runtime.loss_scaler is not None and is_synchronised:
            runtime.loss_scaler.finish_backward()
        if accumulation.held or accumulation.kept:
            accumulation.note_backward(named or list(self._set_up.models.values()), is_named=bool(named))
        moments.num_backwards += is_synchronised
        for moment in moments.after_backward:
            moment(loss, is_synchronised)
        if moments.num_backwards >= moments.due_at:
            moments.due()

    def _of_named(self, model: nn.Module | Sequence[nn.Module]) -> tuple[list[Prepared], Callable[..., None]]:
        """The models that a loss goes through, and its backward."""
        modules = (model,) if isinstance(model, nn.Module) else tuple(model)
        named = [self._set_up.prepared(each, "backward(model=...)") for each in modules]
        # The loss of one model may go through another one, whose gradients must be synchronised as well.
        joins = all(each.joins_backward for each in self._set_up.models.values())
        return named, self._through(named) if len(named) == 1 and not joins else self._of_all

    def _through(self, models: Sequence[Prepared]) -> Callable[..., None]:
        """The backward of a loss that may reach these models, and parameters in no module."""
        runtime, bare = self._runtime, self._set_up.bare
        scaler = runtime.loss_scaler
        scale = None
        if len(models) == 1 and models[0].scale_loss is not None:
            scale = partial(_scale, ref(models[0]))
        return backward_through(
            scale or (None if scaler is None else scaler.scale_loss),
            [*(model.sync for model in models), *([bare] if bare else [])],
            runtime.new_tensors if casts(runtime.precision) else None,
        )

    def _of_one(self, *args: Any, **kwargs: Any) -> None:
        """The backward where each model has an engine of its own: all but one may be gone."""
        if not self._is_one_left():
            raise RuntimeError(_WHICH_MODEL)
        self._of_all(*args, **kwargs)

    def _is_one_left(self) -> bool:
        """Whether one model is left, without those that only reference cycles keep."""
        gc.collect()
        self.models_changed()
        return len(self._set_up.models) == 1

    def _run_weighted(self, run: Callable[[], None], named: Sequence[Prepared], weight: Weight) -> None:
        bare = self._set_up.bare or None
        if len(self._set_up.models) != 1 and (not named or bare is not None) and not self._is_one_left():
            raise ValueError(_WEIGHT_OF_WHICH_MODEL)
        models = named or list(self._set_up.models.values())
        num_held = sum(any(model is each for each in self._accumulation.held) for model in models)
        if 0 < num_held < len(models):
            raise RuntimeError(_SYNCED_IN_PART)
        self._weighting.run(run, models, bare, weight, self._set_up.optimizers, is_synchronised=not num_held)


def _no_model(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(f"`fabric.backward(loss)` {NO_MODEL}")


def _scale(model: ref[Prepared], loss: Tensor) -> Tensor:
    prepared = model()
    return loss if prepared is None or prepared.scale_loss is None else prepared.scale_loss(loss)


_WHICH_MODEL = (
    "Several models are set up, and each has an engine of its own to run backward. "
    "Name the model of the loss: `fabric.backward(loss, model=model)`."
)
_NO_TENSOR = "`fabric.backward(loss)` was given a `{}`. Pass the tensor that the loss function gave, without `.item()`."
NO_MODEL = "before `fabric.setup(model)`, or after `fabric.close()`. Set the model up first, and close the fabric last."
_WEIGHT_OF_WHICH_MODEL = (
    "`fabric.backward(loss, weight=...)` with several models set up: a weight divides the gradients of the models that "
    "its loss goes through. Name them: `model=generator`, or `model=[encoder, decoder]` for a loss through both. "
    "Parameters outside of any module cannot be named: make them part of one, `self.temperature = nn.Parameter(...)`."
)
_IN_SHARDS = (
    "If the loss uses weights outside of `forward`, as a penalty does: there they are in shards. Read them in a "
    "`with fabric.gathered(model):`, where they are whole."
)
_FREED = (
    "Weights were freed before this backward, which did not gather them again. If an output of the model that is a "
    "view was changed in place (`logits /= 2`), write `logits = logits / 2`. If the loss has a gradient of inputs, by "
    "`torch.autograd.grad(..., create_graph=True)`, run a forward of its own for it."
)


def _goes_through(loss: Tensor, name: str) -> bool:
    """Whether a function of autograd whose name begins so is among those that computed the loss."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if node.name().startswith(name):
                return True
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return False


_REENTRANT = (
    "The loss goes through `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`. A block that runs twice "
    "before its backward, in one forward or in two, then gives its weights their gradients twice, which this strategy "
    "cannot synchronise. Pass `use_reentrant=False`."
)
_EXPLAINED = {
    "mixed torch.Tensor and DTensor": _IN_SHARDS,
    "returned an invalid gradient": _IN_SHARDS,  # of DeepSpeed and of FairScale
    "out of bounds for storage of size 0": _FREED,
}
"""Words in errors of torch, and the sentence that is added to each."""
_SYNCED_IN_PART = (
    "`fabric.backward(loss, weight=..., model=[...])` while some of the models are within `no_backward_sync` and "
    "others are not. Enter `no_backward_sync` for all of them, or pass all of them to `accumulate`."
)
