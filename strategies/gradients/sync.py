"""The interface of gradient synchronisation for one prepared model, and the backward that is composed of it.

Every technique has one `GradientSync` per model: it runs forward, knows whether gradients are synchronised at present,
and completes the synchronisation after a backward. `Prepared` is made from it, and accumulation and weighting use it:
none of them asks which technique it is.

Averaging of gradients after backward, over the ranks of a collective, is here too, and gradients times a factor.

# Note [Averages of averages]
All of `.grad` is averaged, including the gradients that have accumulated. A part that was averaged before is equal on
every rank, so averaging does not change it; a part that was not synchronised (`no_backward_sync`) is averaged now. So
accumulation is exact, however synchronised and unsynchronised backwards alternate.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias, cast, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fabric.strategies.collectives.collective import HOST_DEVICES, Collective
from fabric.strategies.tensors.dtensor import as_sharded, local_part
from fabric.strategies.tensors.packing import exchange
from fabric.strategies.undo import hold_weakly

Factor: TypeAlias = float | Tensor
"""A number, or a tensor without dimensions, whose value is not copied to the host."""

_SINGLE_BYTES = 4


NONE, DENSE, SPARSE = range(3)


def kind_of(gradient: Tensor | None) -> int:
    """NONE, DENSE or SPARSE. Ranks exchange this before they exchange gradients."""
    if gradient is None:
        return NONE
    return DENSE if gradient.layout == torch.strided else SPARSE


def refuse_sparse(parameters: Sequence[Tensor], kinds: Sequence[int]) -> None:
    """Raise RuntimeError if a parameter has a sparse gradient. `kinds`: the maximum over all ranks."""
    for parameter, kind in zip(parameters, kinds, strict=True):
        if kind == SPARSE:
            raise RuntimeError(
                f"A gradient of shape {tuple(parameter.shape)} is sparse, and ranks average dense ones here. Make the "
                "layer with `sparse=False`, or pass `strategy='ddp'`, which averages both."
            )


@torch.no_grad()
def average(collective: Collective, parameters: Iterable[Tensor]) -> None:
    """Average the gradients over the ranks, in place. A rank without a gradient counts as zero.

    See Note [Averages of averages]. Ranks: all of `collective`, with the same parameters, or the same shards of them.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    present = _present_anywhere(collective, trainable)
    gradients = [local_part(each.grad) for each in present if each.grad is not None]
    exchange(gradients, partial(collective.all_reduce, op="mean"))


@torch.no_grad()
def redistribute(parameters: Sequence[nn.Parameter]) -> None:
    """Redistribute gradients to the placements of their parameters. Ranks: all that hold a part of them.

    A replicated parameter may get a partial gradient (`Partial`) from backward: for example that of a norm whose input
    is sharded along the sequence.
    """
    for parameter in parameters:
        gradient, layout = as_sharded(parameter.grad), as_sharded(parameter)
        if gradient is not None and layout is not None and gradient.placements != layout.placements:
            parameter.grad = cast(Tensor, gradient.redistribute(placements=layout.placements))


def _present_anywhere(collective: Collective, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters with a gradient on any rank; this rank gets zeros if it has none.

    On an accelerator, only a rank that lacks a gradient waits for the device. Raises: RuntimeError: a gradient is
    sparse on any rank, before anything is sent; on an accelerator, where all gradients of a rank are dense, on others.
    """
    if not parameters:
        return []
    kinds, device = [kind_of(parameter.grad) for parameter in parameters], parameters[0].device
    if device.type not in HOST_DEVICES and set(kinds) == {DENSE}:  # present, whatever the other ranks have
        anywhere = kinds
        collective.all_reduce(torch.full((len(kinds),), DENSE, dtype=torch.int8, device=device), "max")
    else:
        mine = torch.tensor(kinds, dtype=torch.int8, device="cpu" if device.type in HOST_DEVICES else device)
        anywhere = collective.all_reduce(mine, "max").tolist()
    present = [parameter for parameter, kind in zip(parameters, anywhere, strict=True) if kind != NONE]
    refuse_sparse(parameters, anywhere)
    for parameter in present:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return present


def scale_gradients(parameters: Iterable[Tensor], factor: Factor) -> None:
    """Multiply the gradients of the trained parameters, or this rank's shards of them."""
    multiply([grad for each in parameters if (grad := each.grad) is not None and each.requires_grad], factor)


@torch.no_grad()
def multiply(tensors: Iterable[Tensor], factor: Factor) -> None:
    """Multiply tensors, or this rank's shards, of any dtypes in place, each product rounded once."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        part = each if type(each) is Tensor else local_part(each)
        alike.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), parts in alike.items():
        if dtype.itemsize < _SINGLE_BYTES:  # torch would round the factor to 16 bits as well: `_foreach_mul_`, `mul_`
            wide = torch.as_tensor(factor, device=device) if isinstance(factor, Tensor) else factor
            for part in parts:
                part.copy_(part.float().mul_(wide))
        elif isinstance(factor, Tensor) or device.type == "cpu":  # which would convert a number for each gradient
            torch._foreach_mul_(parts, torch.as_tensor(factor, dtype=dtype.to_real(), device=device))
        else:
            torch._foreach_mul_(parts, factor)


NOT_ALONE = "`find_batch_size` cannot try sizes here: {why}. Find the size on one device (`devices=1`)."

Finish: TypeAlias = Callable[[], None]
"""Called after a backward: completes its synchronisation, or raises RuntimeError if gradients are wrong."""


class GradientSync(ABC):
    """Forward and backward of one model. Ranks: all create it together, one for each model.

    After a synchronised backward the gradients are the gradients of the mean of all ranks' losses, including the
    gradients that have accumulated before, whether synchronised or not.
    """

    synced = True
    """Whether backward synchronises gradients at present, if the technique supports that they are not."""
    refuses: Mapping[str, str] = {}
    """Arguments of `Tensor.backward` that the technique does not support, each with the error of its use."""
    fsdp_units: Sequence[Any] = ()
    """The modules that `fully_shard` was called on, which are told whether they synchronise gradients."""
    units: Sequence[nn.Module] = ()
    """The modules other than `fsdp_units` whose parameters are gathered until the end of their forward."""

    @abstractmethod
    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `function(*args, **kwargs)`, where `function` is `forward` of the model, or another marked method."""

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Context: gradients are not synchronised, if the technique supports that. It can be nested; on exit the
        previous state is restored, also after an error."""
        before = self.synced
        self.set_synced(False)
        try:
            yield
        finally:
            self.set_synced(before)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Context: forwards and backwards that may raise anywhere, with collectives that are answered alone.

        It ends as it began, but for what is in `.grad` of `parameters_held`. Memory is as in a synchronised backward.
        Raises: ValueError (`NOT_ALONE`): a rank cannot run alone, or one that raised would leave the model unusable.
        """
        with self.unsynced():
            yield

    def set_synced(self, synced: bool) -> None:
        """Synchronise gradients or not from now on."""
        self.synced = synced
        for unit in self.fsdp_units:
            unit.set_requires_gradient_sync(synced, recurse=False)

    @abstractmethod
    def watch(self) -> Finish | None:
        """Called before each backward that may reach the model. May return a function to be called after the
        backward."""

    @abstractmethod
    def parameters_held(self) -> Iterable[Tensor]:
        """The parameters as optimizers hold them: shards, even while `module.parameters()` returns gathered ones."""

    def scale(self, factor: Factor) -> None:
        """Multiply the model's present synchronised gradients, with which its optimizers would step.

        If an engine reduces gradients itself, it does so now, and its window of backwards ends. Ranks: all.
        """
        scale_gradients(self.parameters_held(), factor)

    @abstractmethod
    def release(self) -> None:
        """Restore the user's objects, before the process group is destroyed. Called once."""


@final
class LocalGradientSync(GradientSync):
    """One process computes the gradients of the whole batch: nothing is communicated.

    `run`: what runs forward, if not the method itself: it is called as `run(function, args, kwargs)`.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any] | None = None) -> None:
        self.module, self._run = module, run

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs) if self._run is None else self._run(function, args, kwargs)

    def watch(self) -> Finish | None:
        return None

    def parameters_held(self) -> Iterable[Tensor]:
        return self.module.parameters()

    def release(self) -> None:
        pass


def all_of(*finishes: Finish | None) -> Finish | None:
    """A function that calls the given ones in order; None if there are none."""
    present = [finish for finish in finishes if finish is not None]
    if len(present) < 2:
        return present[0] if present else None

    def finish() -> None:
        for each in present:
            each()

    return finish


def backward_through(
    scale_loss: Callable[[Tensor], Tensor] | None,
    syncs: Sequence[GradientSync],
    within: AbstractContextManager[None] | None = None,
) -> Callable[..., None]:
    """The function `backward(loss, *args, **kwargs)` for a loss that may reach any of the models of `syncs`.

    `scale_loss`: the precision's loss scaling. It is called first, because it may rescale existing gradients.
    `within`: the context of backward, because activation checkpointing runs forward again in it.
    Nothing runs for models that the program has dropped.
    """
    watched = [ref(sync) for sync in syncs if not isinstance(sync, LocalGradientSync)]
    refused = [refusal for sync in syncs for refusal in sync.refuses.items()]

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for word, sentence in refused if kwargs else ():
            if kwargs.get(word) is not None and kwargs[word] is not False:
                raise ValueError(sentence)
        scaled = loss if scale_loss is None else scale_loss(loss)
        finishes = []
        for each in watched:  # no comprehension, which is a call
            if (sync := each()) is not None and (finish := sync.watch()) is not None:
                finishes.append(finish)
        scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        for finish in finishes:
            finish()

    chosen = Tensor.backward if scale_loss is None and not watched else backward
    return chosen if within is None else partial(_run_within, within, chosen)


INPUTS_OF_SHARDS = {
    "inputs": "`fabric.backward(loss, inputs=...)` of a model in shards: its gradients reach other tensors than "
    "`model.parameters()` gives, and would not be averaged. Freeze parameters by `requires_grad_(False)`; for the "
    "gradient of an input write `torch.autograd.grad(loss, input)`."
}


GRAPH_OF_GRADIENTS = {
    "create_graph": "`fabric.backward(loss, create_graph=True)`: torch's DistributedDataParallel averages gradients in "
    "place, which those with a graph do not allow. For a penalty on gradients add it to the loss, from "
    "`torch.autograd.grad(..., create_graph=True)`."
}


def _run_within(context: AbstractContextManager[None], run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with context:
        run(*args, **kwargs)


@final
class CallModule(nn.Module):
    """Contains the user's module; it calls a given function, such as any marked method of that module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `function(*args, **kwargs)`. Not `forward`: this module has no hooks, and `nn.Module.__call__`
        takes 1 us to look for them."""
        return function(*args, **kwargs)


def end_reducer(parallel: DistributedDataParallel) -> None:
    """Drop DDP's reducer before the process group is destroyed. The model cannot average gradients afterwards."""
    # Note [The reducer ends before the process group]
    # The reducer holds the group from C++. If it were the last owner, the group's destructor would wait for gloo's
    # threads while holding the GIL, which those threads need: 1 in 10 of our closing ranks hung (torch 2.13).
    # DistributedDataParallel is part of a reference cycle, so dropping it is not enough.
    for name in ("logger", "reducer"):
        vars(parallel).pop(name, None)


def one_gradient_each(parameters: Iterable[Tensor]) -> Finish:
    """Count the gradients of a backward. The returned function is called after it, and raises RuntimeError if a
    parameter got several.

    Cost: a hook of each parameter, so that strategies watch their first backward only.
    """
    arrived: list[Tensor] = []
    trained = (each for each in parameters if each.requires_grad)
    hooks = [each.register_post_accumulate_grad_hook(arrived.append) for each in trained]  # type: ignore[no-untyped-call]

    def finish() -> None:
        for hook in hooks:
            hook.remove()
        if len(arrived) > len(set(arrived)):
            raise RuntimeError("This backward gave parameters several gradients, and only the first was averaged.")

    return finish


def on_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook` for each accumulated gradient, also if the parameter is frozen now and unfrozen later.

    It is held weakly: the caller keeps it. See `hold_weakly`.
    """
    before = parameter.requires_grad
    parameter.requires_grad_()
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(before)
    hold_weakly(handle)
    return handle
