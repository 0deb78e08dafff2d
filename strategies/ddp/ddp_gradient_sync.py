"""Gradients of one model, averaged by torch's DistributedDataParallel while backward still runs.

DistributedDataParallel is kept beside the user's module, and created again if the set of trained parameters changes.
"""

import inspect
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fabric.strategies.collectives.fabric_calls_check import check_call
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero, buffers_of
from fabric.strategies.ddp.comm_hooks import register
from fabric.strategies.gradients.sync import (
    GRAPH_OF_GRADIENTS,
    CallModule,
    Factor,
    Finish,
    GradientSync,
    end_reducer,
    one_gradient_each,
    scale_gradients,
)
from fabric.strategies.module.output_tensors import list_hidden_tensors, restore_output
from fabric.strategies.module.parameter_changes import ParameterSnapshot
from fabric.strategies.tensors.packing import Spec
from fabric.strategies.tensors.parameters import name_some

if TYPE_CHECKING:
    from fabric.strategies.ddp.strategy import DDPStrategy
    from fabric.strategies.runtime import Runtime

_grad = attrgetter("grad")
_state = attrgetter("requires_grad", "dtype", "device")


@final
class DDPGradientSync(GradientSync):
    """Gradient averaging of one model: whether the next backward synchronises, and whether the last one did."""

    refuses = GRAPH_OF_GRADIENTS

    def __init__(self, options: "DDPStrategy", runtime: "Runtime", module: nn.Module) -> None:
        self.options, self.collective, self.module = options, runtime.collective, module
        self.expects_backward = False
        self.needs_all = not (options.find_unused_parameters or options.static_graph)
        self.contents = ParameterSnapshot(module)
        self.states: list[Any] = []  # of the parameters when `parallel` was created
        self.parameters: list[nn.Parameter] = []
        self.parallel: DistributedDataParallel | None = None
        self.is_new = False  # `parallel` has averaged nothing yet
        self.alike: ParameterSnapshot | None = None  # tensors that were broadcast from rank 0
        if self.contents.trainable():
            self._arrange()

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        as_before = self.contents.is_as_it_was() and list(map(_state, self.contents.parameters)) == self.states
        if not as_before and not self._is_arranged():  # all parameters are frozen: nothing to average
            output = function(*args, **kwargs)
        else:
            assert self.parallel is not None
            if self.parallel.require_backward_grad_sync is not self.synced:  # a module's attributes are slow to set
                if self.options.static_graph and not self.synced:
                    raise RuntimeError(STATIC)
                self.parallel.require_backward_grad_sync = self.synced
            # Not `self.parallel(...)`: it has no hooks, and a module's `__call__` takes 1 us to look for them.
            if self.needs_all:
                output = self.parallel.forward(function, args, kwargs)  # type: ignore[no-untyped-call]
            else:  # torch searches the outputs for the parameters behind them
                searched = self.parallel.forward(  # type: ignore[no-untyped-call]
                    lambda *args, **kwargs: list_hidden_tensors(function(*args, **kwargs)), args, kwargs
                )
                output = restore_output(searched)
            self.expects_backward = self.expects_backward or self.synced
        if self.synced and self.parallel is not None and self.options.broadcast_buffers and any(self.contents.buffers):
            # Not before forward, as in torch: this way an evaluation finds equal buffers, and needs no message.
            broadcast_from_rank_zero(self.collective, buffers_of(self.contents.modules))
        return output

    def parameters_held(self) -> Iterable[Tensor]:
        # To traverse the modules would cost more than the rest of a weight.
        return self.contents.parameters if self.contents.is_as_it_was() else self.module.parameters()

    def scale(self, factor: Factor) -> None:
        scale_gradients(self.parameters, factor)  # those that were averaged; no need to compare them again

    def release(self) -> None:
        if self.parallel is not None:
            end_reducer(self.parallel)

    def _is_arranged(self) -> bool:
        """Make sure that all trained parameters are averaged; False if there are none. Ranks: all, if the set has
        changed.

        # Note [Layers that come after setup]
        DistributedDataParallel averages the parameters that it found when it was created. So if a layer was added,
        replaced, frozen or unfrozen since, or the model was converted (`model.double()`, for which torch drops the
        hooks of the reducer without a message), all ranks create another one together, and new tensors are broadcast
        from rank 0. If a whole model is frozen for a while, like a critic in each step of its generator, its
        DistributedDataParallel is kept.
        """
        if not self.contents.is_as_it_was():
            now = ParameterSnapshot(self.module)
            if not all(isinstance(each, nn.Parameter) for each in now.parameters):
                return self.parallel is not None  # within `torch.func.functional_call`, with functions of the weights
            self.contents, self.states = now, []
        if list(map(_state, self.contents.parameters)) != self.states:
            if not self.contents.trainable():
                return False
            self._arrange()
        return True

    def _arrange(self) -> None:
        if self.parallel is not None:
            named = self.module.named_parameters()
            lines = [f"{name}: {Spec.of(each)}" for name, each in named if each.requires_grad]
            check_call(self.collective, "\n".join([f"forward of `{type(self.module).__name__}`, which trains", *lines]))
            end_reducer(self.parallel)
        options = self.options
        self.parallel = DistributedDataParallel(
            CallModule(self.module),
            process_group=self.collective.for_gradients().process_group,
            bucket_cap_mb=options.bucket_bytes / 2**20,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            init_sync=False,
            **_BUFFERS_ARE_OURS,  # type: ignore[arg-type]
        )
        if options.comm_hook is not None:
            register(self.parallel, options.comm_hook)
        broadcast_from_rank_zero(self.collective, self.contents.new_since(self.alike))
        self.alike, self.parameters = self.contents, self.contents.trainable()
        self.states = list(map(_state, self.contents.parameters))
        self.is_new = not options.static_graph  # that one waits for all gradients

    def watch(self) -> Finish | None:
        # Note [Gradients that were not averaged]
        # The reducer averages in the first backward after a forward through it, and silently leaves gradients local in
        # any other. So if no such forward is outstanding, gradients must not change.
        if not self.synced:
            return None
        parameters = self.parameters
        if not self.expects_backward:  # also those that no forward has used yet
            parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        before = list(map(_grad, parameters))
        versions: list[int] = []
        if any(map(is_not, before, repeat(None))):
            versions = [-1 if grad is None else grad._version for grad in before]
        refuse_twice = one_gradient_each(parameters) if self.is_new and self.collective.size > 1 else None

        def check() -> None:
            changed = list(map(is_not, map(_grad, parameters), before))
            if versions and not all(changed):
                for index, (parameter, version) in enumerate(zip(parameters, versions, strict=True)):
                    changed[index] |= parameter.grad is not None and parameter.grad._version != version
            if not any(changed):
                return
            if refuse_twice is not None:
                refuse_twice()
            if not self.expects_backward:
                raise RuntimeError(_NOT_AVERAGED.format(name=type(self.module).__name__))
            self.expects_backward = self.is_new = False
            if self.needs_all and not all(changed):
                # Torch waits for them without a message, the rest of their buckets not averaged, and raises one step
                # late.
                left_out = {id(p) for p, took_part in zip(parameters, changed, strict=True) if not took_part}
                names = [name for name, parameter in self.module.named_parameters() if id(parameter) in left_out]
                raise RuntimeError(
                    f"{len(names)} parameters of `{type(self.module).__name__}` ({name_some(names)}) got no gradient "
                    f"in this backward, while others did. {UNUSED}"
                )

        return check


# torch 2.13 deprecates the second name; 2.9 has only that.
_OF_TORCH = inspect.signature(DistributedDataParallel).parameters
_BUFFERS_ARE_OURS = {"forward_sync_buffers" if "forward_sync_buffers" in _OF_TORCH else "broadcast_buffers": False}


_NOT_AVERAGED = (
    "This backward computed gradients of `{name}` that were not averaged over the ranks. Either the loss came from a "
    "method other than `forward` (call `model.mark_forward_method('name')` once after `setup`), or backward ran twice "
    "after one forward (add the losses, and call `fabric.backward` once), or forward ran inside `no_backward_sync` and "
    "backward outside of it. The weights are unchanged; `optimizer.zero_grad()` discards the gradients."
)

STATIC = (
    "`DDPStrategy(static_graph=True)` learns in its first backward which gradients to wait for, and torch ends in an "
    "INTERNAL ASSERT if that is within `no_backward_sync` or a window of `accumulate`. "
    "Leave `static_graph` out, or do not accumulate gradients."
)
UNUSED = (
    "Averaging waits for every parameter, and so the gradients of some others are not averaged either. Pass "
    "`find_unused_parameters=True` (`strategy='ddp_find_unused_parameters_true'`), or freeze what takes no part with "
    "`requires_grad_(False)`."
)
