"""The methods of a `Fabric` in one process of plain PyTorch: the reference that every strategy must equal.

Each method is the line of torch that a plain loop would have. If each share of the data is computed separately
(statistics of BatchNorm, rounding in half precision), there is a replica of the model for each share, in a thread, and
gradients are averaged here. The loss scale is constant, and small enough that nothing overflows.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.read_and_verify import read_checkpoint
from fabric.strategies.checkpoint.state import ObjectStates
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.data.transfer import move
from fabric.strategies.precision.precision import Precision
from fabric.strategies.tensors.parameters import parameters_of

if TYPE_CHECKING:
    from fabric.fabric import Fabric

T = TypeVar("T")
SCALE = 2.0**8
"""The loss scale in float16, here and under the strategy. An overflow would skip a step, and the runs would differ."""


Loop: TypeAlias = "Fabric | _PlainLoop"
"""What the cases run with: the methods of a `Fabric` that they use are those of `_PlainLoop`."""


def plain(body: Callable[[Loop], T], precision: Precision, device: torch.device, num_copies: int = 1) -> T:
    """The result of `body` in one process of plain PyTorch; with `num_copies` threads, that of the first."""
    table = _Exchange(num_copies)
    loops = [_PlainLoop(table, index, precision, device) for index in range(num_copies)]
    if num_copies == 1:
        return body(loops[0])
    with ThreadPoolExecutor(num_copies) as threads:
        futures = [threads.submit(table.leave_on_error, body, loop) for loop in loops]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return futures[0].result()


@final
class _Exchange:
    """Exchanges objects between the threads."""

    def __init__(self, num_copies: int) -> None:
        self.num_copies = num_copies
        self._places: list[Any] = [None] * num_copies
        self._all_here = threading.Barrier(num_copies)

    def exchange(self, index: int, mine: T) -> list[T]:
        """All-gather objects over the threads. All threads call it."""
        self._places[index] = mine
        self._all_here.wait()
        received = list(self._places)
        self._all_here.wait()  # no thread writes the next object before all have read these
        return received

    def leave_on_error(self, body: Callable[[Loop], T], loop: Loop) -> T:
        """Run `body`; if it fails, break the barrier so that other threads do not wait."""
        try:
            return body(loop)
        except BaseException:
            self._all_here.abort()
            raise


@final
class _PlainLoop:
    """The methods of a `Fabric`, for one thread."""

    def __init__(self, table: _Exchange, index: int, precision: Precision, device: torch.device) -> None:
        self.world_size, self.global_rank, self.is_global_zero = table.num_copies, index, index == 0
        self._table, self._precision, self._device = table, precision, device
        self.collective: Collective = SingleDeviceCollective()
        self._modules: list[nn.Module] = []
        self._guarded = False
        self._synced = True
        self._weight = 0.0
        """Sum of the weights of backward passes that were not synchronised yet."""
        self._averages: list[tuple[Tensor, int]] = []
        """Gradients after the last synchronised backward, and their versions: unscaled, and equal in all threads."""

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Cast and move the model; in mixed precision its forward runs under autocast."""
        if self._precision.is_mixed:
            module.to(self._device)
            run = torch.autocast(self._device.type, dtype=self._precision.compute_dtype)(module.forward)
            object.__setattr__(module, "forward", run)
        else:
            module.to(self._device, self._precision.param_dtype)
        object.__setattr__(module, "mark_forward_method", lambda method: None)
        self._modules.append(module)
        for optimizer in optimizers if self._guarded else ():
            optimizer.register_step_pre_hook(_skip_nonfinite)
        return (module, *optimizers) if optimizers else module

    def setup_module(self, module: nn.Module) -> nn.Module:
        return self.setup(module)  # type: ignore[no-any-return]

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def setup_dataloaders(self, *loaders: Iterable[Any], use: Any = None, uneven: Any = None) -> Any:
        (loader,) = loaders
        return _Split(loader, self)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def to_device(self, obj: T) -> T:
        return obj.to(self._device) if isinstance(obj, (Tensor, nn.Module)) else obj  # type: ignore[return-value]

    def accumulate(self, batches: Iterable[T], num_batches: int, *models: nn.Module) -> Iterator[Iterable[T]]:
        """Lists of `num_batches` batches, the last one shorter."""
        remaining = iter(batches)
        while window := list(islice(remaining, num_batches)):
            yield self._window(window)

    def _window(self, window: list[T]) -> Iterator[T]:
        for number, batch in enumerate(window, start=1):
            self._synced = number == len(window)
            yield batch

    def backward(self, loss: Tensor, *, model: nn.Module | None = None, weight: float | Tensor | None = None) -> None:
        """Compute gradients, average them over all replicas, and divide them by the mean of the weights."""
        self._weight += float(weight or 0)
        self._backward(loss)
        if self._synced and weight is not None:
            mean = sum(self._table.exchange(self.global_rank, self._weight)) / self.world_size
            self._weight = 0.0
            for parameter in (each for module in self._modules for each in module.parameters()):
                if parameter.grad is not None:
                    parameter.grad *= 1 / mean if mean else 0

    def _backward(self, loss: Tensor) -> None:
        scale = SCALE if self._precision.scales_loss else 1.0
        if not self._synced:
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            return
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        aside = [(each, each.grad) for each in parameters if each.grad is not None and self._is_average(each.grad)]
        for parameter, _ in aside:
            parameter.grad = None
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = self._mean(parameter.grad) / scale
        for parameter, average in aside:
            parameter.grad = average if parameter.grad is None else average + parameter.grad
        self._averages = [(each.grad, each.grad._version) for each in parameters if each.grad is not None]
        for module in self._modules:
            for buffer in module.buffers():
                buffer.copy_(self._table.exchange(self.global_rank, buffer.clone())[0])

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Iterator[None]:
        before, self._synced = self._synced, not enabled and self._synced
        try:
            yield
        finally:
            self._synced = before

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        parameters = [each for one in given for each in parameters_of(one)] or list(module.parameters())
        if clip_val is not None:
            nn.utils.clip_grad_value_(parameters, clip_val)
            return None
        assert max_norm is not None
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def guard_gradients(self, on_nonfinite: Any) -> None:
        self._guarded = on_nonfinite is not None

    def ema(self, module: nn.Module, decay: float = 0.999) -> Any:
        return _PlainAverage(module, decay)

    def gathered(self, module: nn.Module, **words: bool) -> AbstractContextManager[None]:
        return torch.no_grad() if words.get("for_forward") else nullcontext()

    def weights(self, model: nn.Module, **_: Any) -> Iterator[tuple[str, Tensor]]:
        return ((name, each.detach().clone()) for name, each in (*model.named_parameters(), *model.named_buffers()))

    def barrier(self) -> None:
        self._table.exchange(self.global_rank, None)

    def broadcast(self, obj: T) -> T:
        return self._table.exchange(self.global_rank, obj)[0]

    def all_gather(self, data: Any, *, sync_grads: bool = False) -> Any:
        return torch.stack(self._table.exchange(self.global_rank, data))

    def all_reduce(self, data: Any, *, reduce_op: Any = "mean") -> Any:
        stacked = torch.stack(self._table.exchange(self.global_rank, data))
        return stacked.sum(dim=0) if reduce_op == "sum" else stacked.mean(dim=0)

    def gather_for_metrics(self, values: list[Any], loader: Any) -> Any:
        """The tensors of dictionaries, batch by batch and in each batch copy by copy."""
        of_copies = self._table.exchange(self.global_rank, values)
        batches = [batch for step in zip(*of_copies, strict=True) for batch in step]
        return {name: torch.cat([batch[name] for batch in batches]) for name in values[0]}

    def save(self, path: str, state: dict[str, Any], *, blocking: bool = True) -> None:
        if self.is_global_zero:
            torch.save(ObjectStates().read(state), path)
        self.barrier()

    def load(self, path: str, state: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
        content = read_checkpoint(path) if Path(path).is_dir() else torch.load(path, weights_only=False)  # its own file
        return ObjectStates().restore({} if state is None else state, content, strict=True)

    def state_dict(self, model: nn.Module, optimizer: Any = None, *, all_ranks: bool = False) -> Any:
        copied = copy.deepcopy((model.state_dict(), None if optimizer is None else optimizer.state_dict()))
        on_cpu = move(copied, torch.device("cpu"))
        return on_cpu[0] if optimizer is None else on_cpu

    def _is_average(self, gradient: Tensor) -> bool:
        """Whether a gradient is unchanged since it was averaged."""
        return any(gradient is average and gradient._version == version for average, version in self._averages)

    def _mean(self, mine: Tensor) -> Tensor:
        return torch.stack(self._table.exchange(self.global_rank, mine)).mean(dim=0)


def _skip_nonfinite(optimizer: Any, args: Any, kwargs: Any) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    optimizer.step_was_skipped = not all(each.grad.isfinite().all() for each in parameters)
    if optimizer.step_was_skipped:
        for parameter in parameters:
            parameter.grad = None


@final
class _PlainAverage:
    """A moving average, parameter by parameter."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay = module, decay
        self._averages = [parameter.detach().clone() for parameter in module.parameters()]
        self.num_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        for average, parameter in zip(self._averages, self._module.parameters(), strict=True):
            average.copy_(self._decay * average + (1 - self._decay) * parameter)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._exchange()
        yield
        self._exchange()

    def state_dict(self) -> dict[str, Any]:
        with self.applied():
            state = {name: value.clone() for name, value in self._module.state_dict().items()}
        return {"model": state, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.applied():
            self._module.load_state_dict(state["model"])
        self.num_updates = state["num_updates"]

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, parameter in zip(self._averages, self._module.parameters(), strict=True):
            before = parameter.clone()
            parameter.copy_(average)
            average.copy_(before)


@final
class _Split:
    """Each batch split into as many parts as there are replicas. Can be iterated repeatedly."""

    def __init__(self, loader: Iterable[Any], loop: _PlainLoop) -> None:
        self._loader, self._loop = loader, loop

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield [self._loop.to_device(part.chunk(self._loop.world_size)[self._loop.global_rank]) for part in batch]
