"""What one rank of a fabric has between `launch` and `close`: complete once it is made, and given back by `close`."""

import atexit
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, final

from torch import Tensor
from torch.optim import Optimizer

from fabric.checks.check import Check, Moments
from fabric.checks.nonfinite import FinalWeights, GradientGuard, OnNonfinite
from fabric.checks.sanitizer import Sanitizer, Watch
from fabric.checks.shard_errors import explain_shards, shards_explained
from fabric.configure.determinism import determinism
from fabric.configure.request import Request
from fabric.configure.resolve import Resolved
from fabric.launchers.environments.defaults import recording
from fabric.launchers.process.interpreter import close_files, run_exit_functions
from fabric.launchers.world import World
from fabric.loop.accumulation import Accumulation
from fabric.loop.backward import LossBackward
from fabric.loop.setup import SetUp
from fabric.loop.stop import StopRequest
from fabric.loop.weighting import Weighting
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.collectives.flight_recorder import FlightRecorder
from fabric.strategies.prepared import Prepared

if TYPE_CHECKING:
    from fabric.checkpoints.checkpoints import Checkpoints


@final
class Session:
    """This rank, connected to the others. Ranks: all make one, and close it.

    `environment`: the variables of this process. `draws_apart`: see `Fabric.draws_apart`.
    """

    def __init__(
        self,
        world: World,
        chosen: Resolved,
        request: Request,
        environment: MutableMapping[str, str],
        *,
        draws_apart: bool,
    ) -> None:
        with ExitStack() as stack:
            stack.enter_context(determinism(request.deterministic, environment))
            with recording(environment):
                journal = FlightRecorder()
            runtime = chosen.strategy.connect(world, chosen.accelerator, chosen.devices, chosen.precision)
            stack.callback(runtime.collective.teardown)
            runtime.divergence.is_on = draws_apart
            self.runtime, self.moments = runtime, Moments(runtime.loop_progress)
            self.accumulation, weighting = Accumulation(runtime.loop_progress), Weighting(runtime)
            self.objects = SetUp(runtime, chosen.strategy, self.moments, self.accumulation, weighting)
            self.backward = LossBackward(runtime, self.objects, self.accumulation, weighting, self.moments)
            self.guard: GradientGuard | None = None
            """Installed by `Fabric.guard_gradients`."""
            self._progress = ""
            store = runtime.collective.store()
            if store is not None:
                from fabric.launchers.watch.watcher import Watcher

                report_after = request.report_after_seconds
                stack.callback(Watcher(world, store, journal, report_after, self.progress_in_words).close)
            runtime.collective.progress = self.progress_in_words
            if runtime.layout.weights == "shards":
                stack.enter_context(shards_explained())
            atexit.register(self._close_at_exit)
            stack.callback(atexit.unregister, self._close_at_exit)
            stack.callback(self.forget)  # before the teardown: models hold on to the process group
            stack.callback(self.objects.detach)
            self.moments.add(*request.checks, *self._sanitizer(request, chosen))
            self._chosen, self.log_dir = chosen, request.log_dir
            self.describe(request.log_dir)
            self._open = stack.pop_all()

    def begin(self) -> None:
        """Tell the checks that this process is a rank."""
        for moment in self.moments.connected:
            moment(self.runtime)

    def close(self) -> None:
        """Destroy the process group, and restore the environment and the user's objects. Ranks: all."""
        with self._open:
            # After an exception the other ranks may not come.
            if sys.exc_info()[1] is None and "last_value" not in vars(sys):
                for moment in self.moments.closing:
                    moment()

    def find_batch_size(self, function: Callable[[int], object], start: int, most: int) -> int:
        """See `Fabric.find_batch_size`."""
        from fabric.loop.batch_size import find_batch_size

        for check in self.moments.checks:
            if isinstance(check, Watch):  # whose kernels would otherwise come over those that answer alone
                check.compare_collectives()
        return find_batch_size(function, self.objects, start, most)

    def guard_gradients(self, on_nonfinite: OnNonfinite | None) -> None:
        """See `Fabric.guard_gradients`."""
        if self.guard is not None:
            self.moments.remove(self.guard)
            self.guard = None
        if on_nonfinite is not None:
            objects = self.objects
            self.guard = GradientGuard(on_nonfinite, self.runtime, objects.gradients_are_finite, objects.scaler_of)
            self.moments.add(self.guard)
            self.guard.optimizers_set_up(objects.optimizers)

    def clip_norm(
        self, model: Prepared, optimizers: Sequence[Optimizer], max_norm: float, norm_type: float, *, raises: bool
    ) -> Tensor:
        """See `Fabric.clip_gradients`. `raises`: for a norm that is not finite, unless gradients are guarded."""
        norm = model.clip_norm(optimizers, max_norm, norm_type, raises and self.guard is None)
        if self.guard is not None and self.runtime.loss_scaler is None:  # which knows already
            self.guard.note_norm(optimizers, norm)
        return norm

    def describe(self, folder: str | os.PathLike[str] | None) -> None:
        """Write `run.json` into the folder, on rank 0."""
        if folder is not None and self.runtime.world.is_global_zero:
            from fabric.configure import description

            description.describe(Path(folder), self._chosen)

    def explain(self, error: BaseException) -> None:
        """Add to an error with which the user's code ends what is known of its cause."""
        if self.runtime.layout.weights == "shards":
            explain_shards(error)

    def forget(self) -> None:
        """Drop all references to the objects that were set up."""
        self.progress_in_words()
        self.moments.clear()
        self.accumulation.release()
        self.objects.forget()
        self.backward.models_changed()

    def progress_in_words(self) -> str:
        """How far the loop is, or was when the session was closed, for reports. Any thread calls it."""
        if self.objects.counters:
            num_steps = self.objects.num_steps
            self._progress = f"after {num_steps} step{'s' * (num_steps != 1)}"
            if self.runtime.layout.forward_communicates:
                models = list(self.objects.models.values())
                self._progress += f" and {sum(model.path.num_calls for model in models)} forwards"
        return self._progress

    @cached_property
    def checkpoints(self) -> "Checkpoints":
        """What saves and loads. Made when it is first used: a program without checkpoints does not import it."""
        from fabric.checkpoints.checkpoints import Checkpoints

        opened = Checkpoints(self.runtime, self.objects, self.moments)
        self._open.callback(opened.close)
        return opened

    @cached_property
    def stop(self) -> StopRequest:
        """The request to stop. Made when it is first used: from then on signals do not end the process. Ranks: all."""
        opened = StopRequest(self.runtime.world, self.runtime.report)
        self._open.callback(opened.close)
        return opened

    def _sanitizer(self, request: Request, chosen: Resolved) -> Iterator[Check]:
        """What compares the ranks. Not on devices that record a step: reading a number would end its graph there."""
        if request.sanitize is False or chosen.strategy.marks_steps:
            return
        runtime, objects = self.runtime, self.objects
        yield FinalWeights(objects.optimizers, lambda: objects.models.values())
        if runtime.world.size > 1:
            known = objects.optimizers, objects.state_access, objects.unprepared
            yield Sanitizer(Watch(runtime, request.sanitize, self.moments, *known))

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except BaseException as error:
            if isinstance(error, CollectiveError) and error.rank in error.lost:
                return  # the other ranks were not at their end, and raise; this one has its own exit code
            sys.excepthook(type(error), error, error.__traceback__)
            # Python prints the exception of an exit function, but exits with code 0 (3.13).
            atexit.unregister(self._close_at_exit)
            run_exit_functions()
            close_files()
            os._exit(1)
