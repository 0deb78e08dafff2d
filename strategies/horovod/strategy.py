"""The whole model in every process; gradients are averaged over the ranks by Horovod, when backward has ended.

Horovod (Sergeev and Del Balso, arXiv:1802.05799) averages in an optimizer of its own that wraps the user's. Here the
user's optimizer stays itself: what follows a backward, clipping or a closure, finds gradients of the whole batch. A
parameter that no rank has used keeps no gradient, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.launchers.environments.horovod import INSTALL
from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.collectives.call_check import agree
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.collectives.flat import exchange
from fabric.strategies.collectives.packing import Spec
from fabric.strategies.gradients.clipping import NONE, kind_of, on_gradient, refuse_sparse
from fabric.strategies.horovod.collective import HorovodCollective
from fabric.strategies.module.buffers import buffers_of, follow_rank_zero
from fabric.strategies.module.changes import Contents
from fabric.strategies.module.prepare import place, replica
from fabric.strategies.options import own_launchers
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.strategy import Strategy
from fabric.strategies.target import Target
from fabric.strategies.torch_internals import after_backward


@final
@dataclass(frozen=True, kw_only=True)
class HorovodStrategy(Strategy):
    """Data parallel over Horovod: one process per device, started by any launcher, `horovodrun` among them."""

    launcher: str = "auto"
    """How processes come to be: auto, script, fork, forkserver or spawn. auto leaves it to `Fabric(launcher=...)`."""
    timeout_seconds: float = 1800.0
    """How long a collective waits for the other ranks before it raises, naming those that have not arrived."""
    broadcast_buffers: bool = True
    """Buffers (the statistics of BatchNorm) follow rank 0 whenever gradients are averaged."""

    def look_for_packages(self) -> Mapping[str, str]:
        """Imports Horovod: only so is it known what it was built with."""
        try:
            import horovod.torch as hvd
        except (ImportError, OSError) as error:
            return {"horovod cannot be imported": str(error)}
        built = {"gloo": hvd.gloo_built(), "nccl": hvd.nccl_built()}
        return {"horovod": " ".join(name for name, is_built in built.items() if is_built)}

    @property
    def launchers(self) -> tuple[str, ...]:
        return own_launchers(self.launcher)

    def refuse(self, target: Target) -> str | None:
        return _why_not(target)

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        accelerator.connect(devices[world.local_rank])
        device = accelerator.device(devices[world.local_rank])
        return open_runtime(world, [device], HorovodCollective(world, timeout_seconds=self.timeout_seconds), precision)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, move=move)
        averaging = _Averaging(runtime.collective, module, self.broadcast_buffers)
        return replica(
            runtime,
            module,
            optimizers,
            around=averaging.forward,
            unsynced=averaging.unsynced,
            watches=(averaging.watch,),
            end=averaging.end,
        )


@final
class _Averaging:
    """One model's averaging: which gradients have changed since they were averaged last.

    What is averaged is all that has gathered in `.grad`. The part that was averaged before is the same on every rank,
    and its average is itself, so windows of backwards are exact, however many of them are synchronised.
    """

    def __init__(self, collective: Collective, module: nn.Module, broadcast_buffers: bool) -> None:
        self.collective, self.name, self.number = collective, type(module).__name__, _number(collective)
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.changed: set[Tensor] = set()
        self.is_due = self.is_unsynced = False
        self.alike: Contents | None = None  # these started from rank 0's values
        self.hooks: list[RemovableHandle] = []
        self._arrange("setup")

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and not self.contents.is_as_it_was():
            self._arrange("forward after a change")
        return function(*args, **kwargs)

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        before, self.is_unsynced = self.is_unsynced, True
        try:
            yield
        finally:
            self.is_unsynced = before

    def watch(self) -> Callable[[], None] | None:
        """See `Prepared.watches`: where all that the loss is made of is new, no hook of ours is called."""
        return None if self.is_unsynced or self.contents.is_as_it_was() else self._refuse_unmet

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _arrange(self, moment: str) -> None:
        """Average what the model has now; what is new starts from rank 0's values. Ranks: all."""
        self.contents = Contents(self.module)
        self.parameters = [one for one in self.contents.parameters if one.is_floating_point() or one.is_complex()]
        self.buffered = self.contents.modules if self.broadcast_buffers else []
        lines = [f"{name}: {Spec.of(tensor)}" for name, tensor in _tensors(self.module)]
        agree(self.collective, "\n".join([f"{moment} of `{self.name}`", *lines]))
        follow_rank_zero(self.collective, self.contents.new_since(self.alike))
        self.alike = self.contents
        self.end()
        self.hooks = [on_gradient(parameter, self._note) for parameter in self.parameters]

    def _refuse_unmet(self) -> None:
        """Raise RuntimeError where parameters have gradients that no forward has met: nothing averages those."""
        if self.contents.is_as_it_was():
            return
        known = set(self.contents.parameters)
        named = self.module.named_parameters()
        names = [name for name, each in named if each.grad is not None and each not in known]
        if names:
            some = ", ".join(map(repr, names[:5]))
            raise RuntimeError(_UNMET.format(model=self.name, names=some))

    def _note(self, parameter: Tensor) -> None:
        """Called by torch, within a backward, for each gradient that has just changed."""
        self.changed.add(parameter)
        if not self.is_unsynced:
            # Each time, not only the first: a backward that raises forgets what was queued, and we do not hear of it.
            self.is_due = True
            after_backward(self._average)

    def _average(self) -> None:
        """Average, over the ranks, each gradient that has changed on any of them; elsewhere it counts as zero."""
        if not self.is_due:
            return
        self.is_due = False
        self._refuse_unmet()
        mine = [kind_of(each.grad) if each in self.changed else NONE for each in self.parameters]
        self.changed.clear()
        words = torch.tensor([self.number, -self.number, *mine], device="cpu")
        highest, lowest, *anywhere = self.collective.all_reduce(words, "max").tolist()
        if (highest, lowest) != (self.number, -self.number):
            raise CollectiveError(
                f"Ranks ran backward through different models: this one through `{self.name}`, number {self.number} of "
                f"those set up; the numbers go from {-lowest} to {highest}. Make every rank compute the same loss.",
                rank=self.collective.rank,
            )
        refuse_sparse(self.parameters, anywhere)
        gradients = [_gradient(each) for each, kind in zip(self.parameters, anywhere, strict=True) if kind != NONE]
        exchange(gradients, partial(self.collective.all_reduce, op="mean"))
        follow_rank_zero(self.collective, buffers_of(self.buffered))


def _number(collective: Collective) -> int:
    """How many models this rank has set up so far. Gradients are averaged model by model, and ranks may mistake one
    for another."""
    store = collective.store()
    return 0 if store is None else store.add(f"models/{collective.rank}", 1)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, made of zeros where this rank has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _why_not(target: Target) -> str | None:
    """None where Horovod can carry tensors of this device; otherwise why it cannot, and what makes it able to."""
    built, device_type = target.packages.get("horovod"), target.accelerator.device(0).type
    if built is None:
        error = target.packages.get("horovod cannot be imported", "it was not looked for")
        return f"`strategy='horovod'` needs Horovod, which cannot be imported here: {error}. {INSTALL}"
    if "gloo" not in built:
        return f"`strategy='horovod'` lets Horovod's ranks meet by gloo, and this one has none. {INSTALL}"
    if device_type == "cpu" or (device_type == "cuda" and "nccl" in built):
        return None
    return (
        f"`strategy='horovod'` with `accelerator={device_type!r}`: Horovod carries tensors of the CPU, and of CUDA "
        "where it was built with HOROVOD_GPU_OPERATIONS=NCCL. Pass `accelerator='cpu'`, or use 'ddp'."
    )


_UNMET = (
    "This backward computed gradients of parameters that came to `{model}` after `fabric.setup` and that no forward "
    "has met, so they were not averaged over the ranks: {names}. Where the loss comes from a method other than "
    "`forward`, call `model.mark_forward_method('name')` once after `setup`. The weights are unchanged; "
    "`optimizer.zero_grad()` discards the gradients."
)
