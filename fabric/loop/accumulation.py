"""Gradient accumulation: windows of micro-batches with one gradient synchronisation and one optimizer step each.

The last micro-batch of a window is found by reading one ahead, never beyond the window: at the step, the loader's
position is exactly after the samples trained on. Uses `GradientSync` and no strategy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar, final
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.data.device_loader import DeviceLoader
from fabric.strategies.data.loop_progress import NOT_COUNTED, End, LoopProgress, RepeatedBatches
from fabric.strategies.data.partition import length_of, once
from fabric.strategies.gradients.sync import GradientSync
from fabric.strategies.prepared import Prepared
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.parameters import parameters_of

T = TypeVar("T")


@final
class Accumulation:
    """The models of one fabric whose gradients are not synchronised at present, and the current window."""

    def __init__(self, progress: LoopProgress) -> None:
        self._progress = progress
        self.held: list[Prepared] = []
        """Models whose gradients are not synchronised, once for each open context."""
        self.kept: dict[nn.Module, _Kept] = {}
        """Models whose last backward left gradients on the rank that computed them."""
        self.repeated: RepeatedBatches | None = None
        """Set once a loader may repeat batches on ranks whose data has ended."""
        self._guarded: WeakKeyDictionary[Optimizer, Callable[[], None]] = WeakKeyDictionary()

    @contextmanager
    def unsynced(
        self, models: Sequence[Prepared], bare: GradientSync | None, *, rehearses: bool = False
    ) -> Iterator[None]:
        """Context: gradients of these models, and of parameters outside of any module, are not synchronised.
        `rehearses`: see `GradientSync.rehearsal`."""
        with ExitStack() as stack:
            for sync in (*(model.sync for model in models), *([bare] if bare else [])):
                stack.enter_context(sync.rehearsal() if rehearses else sync.unsynced())
            self.held += models
            try:
                yield
            finally:
                del self.held[len(self.held) - len(models) :]

    def note_backward(self, models: Sequence[Prepared], *, is_named: bool) -> None:
        """Called after a backward. The loss may be of any of these models, unless the user has named the models."""
        held = [model for model in models if any(model is each for each in self.held)]
        if is_named or len(held) in (0, len(models)):
            for model in models:
                self.kept.pop(model.module, None)
            self.kept.update({model.module: _Kept(model) for model in held})

    def windows(
        self, batches: Iterable[T], num_batches: int, unsynced: Callable[[], AbstractContextManager[None]]
    ) -> "Iterator[Window[T]]":
        """See `Fabric.accumulate`. `unsynced`: the context of all micro-batches but the last."""
        remaining, taken = _Ahead(iter(batches), self.repeated, self._progress), 0
        total = batches.num_batches_at_start if isinstance(batches, DeviceLoader) else length_of(batches)
        try:
            while remaining.has_next():
                if any(each.is_as_left(each.model.sync.parameters_held()) for each in self.kept.values()):
                    raise RuntimeError(_LEFT)
                # A loader may have more batches than its length says.
                length = None if total is None or taken >= total else min(num_batches, total - taken)
                window = Window(remaining, num_batches, length, unsynced, self._note)
                yield window
                if window.num_read == 0:
                    raise RuntimeError(_UNREAD)
                taken += window.num_read
            remaining.leave(is_complete=True)
        finally:
            remaining.leave(is_complete=False)

    def expect_repeated(self, optimizers: Iterable[Optimizer]) -> None:
        """A loader may repeat batches from now on: a step of these without `fabric.backward` would count them."""
        self.repeated = self._progress.repeated
        self.guard(optimizers)

    def guard(self, optimizers: Iterable[Optimizer]) -> None:
        """Make a step of these optimizers raise RuntimeError if gradients of a window were not synchronised."""
        for optimizer in optimizers:
            if optimizer not in self._guarded:
                self._guarded[optimizer] = hook_steps(optimizer, self._check)

    def release(self) -> None:
        """Remove the guard from the optimizers."""
        for remove in self._guarded.values():
            remove()
        self._guarded.clear()
        self.kept.clear()
        self.repeated = None

    def _note(self, batch: Any) -> None:
        if self._progress.note_batch is not None:
            self._progress.note_batch(batch, self)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.repeated is not None and self.repeated.is_uncounted:
            raise RuntimeError(f"`{type(optimizer).__name__}.step()` {NOT_COUNTED}")
        if any(
            each.model.holds(optimizer) and each.is_as_left(parameters_of(optimizer)) for each in self.kept.values()
        ):
            raise RuntimeError(f"`{type(optimizer).__name__}.step()` {_KEPT_BACK}")


@final
class _Kept:
    """A model and its gradients after a backward that was not synchronised."""

    def __init__(self, model: Prepared) -> None:
        self.model = model
        self._versions = {
            id(parameter.grad): parameter.grad._version
            for parameter in model.sync.parameters_held()
            if parameter.grad is not None
        }

    def is_as_left(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a gradient is as that backward left it, because the program has not written all of them."""
        grads = [grad for each in parameters if (grad := each.grad) is not None]
        return any(self._versions.get(id(grad)) == grad._version for grad in grads)


@final
@dataclass(eq=False)
class Window(Generic[T]):
    """The micro-batches of one optimizer step. Can be iterated once; gradients are synchronised in the last one."""

    _remaining: "_Ahead[T]"
    _num_batches: int
    _length: int | None
    _unsynced: Callable[[], AbstractContextManager[None]]
    _note: Callable[[T], None]
    num_read: int = 0
    """The number of micro-batches yielded so far."""

    def __len__(self) -> int:
        """The number of micro-batches of this window, also for a shorter last window.

        Raises: TypeError: the loader has no length, so the number is not known yet.
        """
        if self._length is None:
            raise TypeError(
                "`len(window)` over a loader without a length, or one that has resumed an epoch by a state of its own: "
                "the number is known only at the end of the window. Write `fabric.backward(loss, weight=1)`, which "
                "divides by the number of micro-batches after the last."
            )
        return self._length

    def __iter__(self) -> Iterator[T]:
        if self.num_read:
            raise RuntimeError("A window of `fabric.accumulate` can be iterated once: its micro-batches are not kept.")
        return self._batches()

    def _batches(self) -> Iterator[T]:
        is_last = False
        with ExitStack() as unsynced:
            while not is_last:
                batch = next(self._remaining)
                is_last = self.num_read + 1 == self._num_batches or not self._remaining.has_next()
                if is_last:
                    unsynced.close()
                elif self.num_read == 0:
                    unsynced.enter_context(self._unsynced())
                self.num_read += 1
                self._note(batch)
                yield batch


@final
class _Ahead(Iterator[T]):
    """An iterator that reads one item ahead, to know whether there is another."""

    def __init__(self, iterator: Iterator[T], repeated: RepeatedBatches | None, progress: LoopProgress) -> None:
        self._iterator: Iterator[T] = once(iterator)
        self._repeated, self._progress = repeated, progress
        self._held: list[T] = []
        self._ends: list[End] = []
        """The iterations whose end was found."""
        self._received: Counter[tuple[object, float]] = Counter()
        """What `repeated` recorded when the item was read; it is put back when the item is yielded."""

    def has_next(self) -> bool:
        if not self._held:
            before = None if self._repeated is None else self._repeated.take()
            with self._progress.reading_ahead() as ends:
                self._held = [*islice(self._iterator, 1)]
            self._ends += ends
            if self._repeated is not None and before is not None:
                self._received = self._repeated.take()
                self._repeated.put(before)
        return bool(self._held)

    def __next__(self) -> T:
        if not self.has_next():
            return next(self._iterator)
        if self._repeated is not None:
            self._repeated.put(self._received)
        return self._held.pop()

    def leave(self, *, is_complete: bool) -> None:
        """Called once, when the loop has asked for another item after the last (`is_complete`), or was left before."""
        for end in self._ends:
            end(is_complete)
        self._ends.clear()


_KEPT_BACK = (
    "after a `fabric.backward` that did not synchronise gradients over the ranks: it ran within `no_backward_sync`, or "
    "before the last micro-batch of a window of `fabric.accumulate`. Run the last backward outside of "
    "`no_backward_sync`, and one in each micro-batch, `fabric.backward(0 * loss)` to skip it; after a `break`, discard "
    "the gradients with `optimizer.zero_grad()`. To average by hand, write `parameter.grad = "
    "fabric.all_reduce(parameter.grad)` for all of them."
)
_LEFT = (
    "The previous window of `fabric.accumulate` was not finished, and its gradients would be added to this one's. "
    "Write `optimizer.zero_grad()` after the `break`, or let the loop over the window run to its end."
)
_UNREAD = "A window of `fabric.accumulate` was not iterated. Write `for batch in window:` within the loop over windows."
