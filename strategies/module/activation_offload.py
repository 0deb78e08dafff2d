"""Activation offload: what a submodule saves for its backward waits in pinned host memory, and comes back ahead of it.

Trades traffic between host and device for the memory of activations (Rajbhandari et al., ZeRO-Infinity,
arXiv:2104.07857). Copies run on a stream beside the computation. When backward reaches a submodule, what the submodule
before it has saved comes back, too. Values are copied, so gradients are equal bit for bit. Tensors of less than 1 MiB,
parameters and views of them stay on the device.
"""

import functools
from collections.abc import Callable
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn

from fabric.strategies.module.activation_checkpointing import Recomputed, chosen_blocks
from fabric.strategies.module.forward import outside_of_graphs
from fabric.strategies.module.wrap_policy import Policy
from fabric.strategies.undo import replace_attributes, undo_all

_LEAST_BYTES = 2**20
"""Smaller tensors stay on the device: a copy of 1 MiB takes about as long as starting it. Not measured."""


def offload(module: nn.Module, policy: Policy | None) -> Callable[[], None]:
    """Offload what the submodules that `policy` selects save. Returns a function that undoes it.

    Raises: ValueError: it selects none. TypeError: it is not a policy.
    """
    parts = chosen_blocks(module, policy, "activation_offload")
    side = _Side()
    return undo_all(replace_attributes(part, forward=Offloaded(part, part.forward, side)) for part in parts)


@final
class _Side:
    """The stream for copies on each device, and what the last forward of a submodule has saved."""

    def __init__(self) -> None:
        self.stream = functools.cache(torch.Stream)
        self.latest: ref[_Saved] | None = None


@final
class _OnHost:
    """One saved tensor: on the host, and from `fetch` to `take` on the device again."""

    def __init__(self, tensor: Tensor, saved: "_Saved", side: torch.Stream) -> None:
        self.saved, self._side, self._device = saved, side, tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        side.wait_stream(torch.accelerator.current_stream(tensor.device))
        with side, torch.no_grad():
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)  # see Note [Who frees a batch copied on another stream]
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        """Start to copy it to the device."""
        if self._fetched is None:
            with self._side, torch.no_grad():
                self._fetched = self._host.to(self._device, non_blocking=True)

    def take(self) -> Tensor:
        """The tensor on the device, once the current stream has waited for the copy. A second backward copies again."""
        self.saved.fetch()
        self.fetch()
        found, self._fetched = self._fetched, None
        assert found is not None
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_stream(self._side)
        found.record_stream(stream)
        return found


@final
class _Saved:
    """What one forward of a submodule has saved, and what the submodule before it has."""

    def __init__(self, before: "ref[_Saved] | None") -> None:
        self._before, self._is_fetched = before, False
        self.tensors: list[ref[_OnHost]] = []

    def fetch(self) -> None:
        """Start to copy all of it to the device, and then what was saved before it."""
        if self._is_fetched:
            return
        self._is_fetched, before = True, None if self._before is None else self._before()
        for each in (*reversed(self.tensors), *reversed([] if before is None else before.tensors)):  # as backward reads
            if (tensor := each()) is not None:
                tensor.fetch()


@final
class Offloaded:
    """A submodule's forward, what it saves for backward offloaded to the host."""

    def __init__(self, part: nn.Module, function: Callable[..., Any], side: _Side) -> None:
        functools.update_wrapper(self, function)
        self._part, self._function, self._side = part, function, side

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return outside_of_graphs(self._run, self._function, args, kwargs)
        return self._run(self._function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        saved = _Saved(self._side.latest)
        self._side.latest = ref(saved)

        def pack(tensor: Tensor) -> Any:
            is_plain = type(tensor) is Tensor and not isinstance(tensor._base, nn.Parameter)
            is_strided = is_plain and tensor.layout is torch.strided and tensor.is_floating_point()
            if not is_strided or tensor.nbytes < _LEAST_BYTES or tensor.device.type == "cpu":
                return tensor
            on_host = _OnHost(tensor, saved, self._side.stream(tensor.device))
            saved.tensors.append(ref(on_host))
            return on_host

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return function(*args, **kwargs)

    def of(self, part: nn.Module) -> "Offloaded":
        """The same for `part`, a copy of the submodule on a device of its own."""
        if part is self._part:
            return self
        inner = self._function
        method = getattr(inner, "__func__", None)
        plain = inner if method is None else method.__get__(part)
        return Offloaded(part, inner.of(part) if isinstance(inner, Recomputed) else plain, _Side())

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._part, "forward")  # unpickled in a copy, whose class has the plain method


def _unpack(packed: Any) -> Tensor:
    return packed.take() if isinstance(packed, _OnHost) else packed


def rebind_copies(module: nn.Module) -> None:
    """Rebind recomputation and offload to `module`, for replicas that share attributes with their original
    (`DataParallel`). Otherwise the replicas would compute with the parameters of the original."""
    for part in module.modules():
        forward = vars(part).get("forward")
        if isinstance(forward, (Recomputed, Offloaded)):
            object.__setattr__(part, "forward", forward.of(part))
