"""Collectives of XLA's replicas, by XLA's own operations, over the interconnect of the devices.

Each call is a graph of its own, executed at once. torch_xla is lazy: a replica that never reads a result would omit
the collective from its graph, while the others wait for it in theirs. Tensors on the CPU are copied to the device and
back. There is no `send`, no `recv` and no subgroup (`split`): all replicas execute the same graph.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from fabric.launchers.rendezvous.join import join
from fabric.launchers.world import World
from fabric.strategies.collectives.collective import CollectiveError, ReduceOp, check_peer, check_slices, check_split
from fabric.strategies.collectives.dtypes import from_reduced, to_reducible
from fabric.strategies.collectives.objects import CarriesObjects
from fabric.strategies.tensors.packing import INTEGERS, Spec, check_dense

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOGGER = logging.getLogger("fabric")

_OPS = {"sum": "sum", "mean": "sum", "min": "min", "max": "max", "product": "mul"}  # mean: divided in `from_reduced`
_FEWEST = 64
"""Tensors on the CPU are padded to this number of elements or a larger power of two: each length is compiled."""


@final
class XLACollective(CarriesObjects):
    """The collective of all replicas. `timeout_seconds`: timeout at the store; XLA's own timeout cannot be set."""

    def __init__(self, world: World, *, timeout_seconds: float = 1800.0) -> None:
        self._world, self._timeout_seconds = world, timeout_seconds
        self._store: Store | None = None

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def size(self) -> int:
        return self._world.size

    def setup(self) -> None:
        """Connect to the other ranks. Raises CollectiveError if XLA's rank or world size is not that of the world."""
        import torch_xla.runtime as xr

        found = (xr.global_ordinal(), xr.world_size())
        if found != (self.rank, self.size):
            raise CollectiveError(
                f"XLA says that this is replica {found[0]} of {found[1]}, and the world that it is rank {self.rank} of "
                f"{self.size}. Launch with `fabric.launch(function)`, and use no XLA device before.",
                rank=self.rank,
            )
        store = join(self._world, self._timeout_seconds, _LOGGER.warning)
        self._store = PrefixStore("messages", store)

    def teardown(self) -> None:
        self._store = None

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device="cpu"))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_peer("broadcast", "src", src, self.size)
        is_source = torch.tensor([self.rank == src], device="cpu")

        def choose(bits: Tensor) -> Tensor:
            return _all_reduce("sum", torch.where(_uploaded(is_source), bits, torch.zeros_like(bits)))

        received = self._moved("broadcast", tensor, choose, rows=1, shape=tensor.shape)
        return tensor.detach() if self.rank == src else received

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        operand = to_reducible(tensor, op, copy=True)
        reduced = self._run("all_reduce", tensor, operand, lambda x: _all_reduce(_OPS[op], x), rows=1)
        return from_reduced(reduced.view(operand.shape), op, tensor.dtype, self.size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        import torch_xla.core.xla_model as xm

        def gather(bits: Tensor) -> Tensor:
            # Not with a pinned layout, for which torch_xla 2.9 pads by the rank: the ranks' graphs would differ.
            gathered: Tensor = xm.all_gather(bits, pin_layout=False)
            return gathered

        return self._moved("all_gather", tensor, gather, rows=1, shape=(self.size, *tensor.shape))

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        import torch_xla.core.xla_model as xm

        check_slices("reduce_scatter", tensor, self.size)

        def scatter(operand: Tensor) -> Tensor:
            mine: Tensor = xm.reduce_scatter(_OPS[op], operand, 1.0, 0, self.size, pin_layout=False)
            return mine

        operand = to_reducible(tensor, op, copy=False)
        reduced = self._run("reduce_scatter", tensor, operand, scatter, rows=self.size)
        return from_reduced(reduced.view(operand.shape[1:]), op, tensor.dtype, self.size)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        import torch_xla.core.xla_model as xm

        check_slices("all_to_all", tensor, self.size)

        def exchange(bits: Tensor) -> Tensor:
            exchanged: Tensor = xm.all_to_all(bits, 0, 0, self.size, pin_layout=False)
            return exchanged

        return self._moved("all_to_all", tensor, exchange, rows=self.size, shape=tensor.shape)

    def send(self, tensor: Tensor, dst: int) -> NoReturn:
        raise CollectiveError(f"`send` on rank {self.rank}: {OF_ALL_REPLICAS}", rank=self.rank)

    def recv(self, like: Tensor, src: int) -> NoReturn:
        raise CollectiveError(f"`recv` on rank {self.rank}: {OF_ALL_REPLICAS}", rank=self.rank)

    def split(self, ranks: Sequence[int]) -> "XLACollective":
        check_split(ranks, self.size, is_part=False)
        if len(ranks) == self.size:
            return self
        raise CollectiveError(f"`split` on rank {self.rank}: {OF_ALL_REPLICAS}", rank=self.rank)

    def store(self) -> "Store":
        return self._joined("store")

    def means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-reduce (mean) tensors on the device, in one graph. Ranks: all call it, as `all_reduce`."""
        import torch_xla

        torch_xla.sync()
        reduced = [_all_reduce("sum", to_reducible(tensor, "mean", copy=True)) for tensor in tensors]
        means = [from_reduced(r, "mean", t.dtype, self.size) for r, t in zip(reduced, tensors, strict=True)]
        torch_xla.sync()
        return means

    def _moved(
        self, operation: str, tensor: Tensor, move: Callable[[Tensor], Tensor], *, rows: int, shape: Sequence[int]
    ) -> Tensor:
        """Apply `move` to the bits of a tensor, as integers, so that no operation rounds them."""
        check_dense(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        real = torch.view_as_real(plain) if plain.is_complex() else plain
        bits = self._run(operation, tensor, real.view(INTEGERS[real.dtype.itemsize]), move, rows=rows)
        moved = bits.contiguous().view(real.dtype).view((*shape, *real.shape[plain.ndim :]))
        return torch.view_as_complex(moved) if plain.is_complex() else moved

    def _run(
        self, operation: str, tensor: Tensor, operand: Tensor, function: Callable[[Tensor], Tensor], *, rows: int
    ) -> Tensor:
        """Run a collective on `operand` as `rows` rows, on the XLA device. The result is on the operand's device."""
        import torch_xla

        self._joined(operation)
        # A clone: with views of a buffer the ranks' graphs would differ.
        flat = operand.reshape(rows, operand.numel() // rows).clone()
        length = flat.shape[1]
        try:
            # In a graph of its own: operations recorded before may differ between ranks, and so would the graphs.
            torch_xla.sync()
            if operand.device.type == "cpu":
                result = function(_uploaded(_padded(flat)))
                torch_xla.sync()
                return result.cpu()[:, :length]
            result = function(flat if length else _padded(flat))
            torch_xla.sync()
            return result[:, :length]
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(
                f"`{operation}` of a tensor {Spec.of(tensor)} failed on rank {self.rank} of {self.size}: "
                f"{str(error).strip()}\nCheck the output of the other ranks: one of them ended, or called something "
                "else.",
                rank=self.rank,
            ) from error

    def _joined(self, operation: str) -> "Store":
        if self._store is None:
            raise CollectiveError(
                f"`{operation}` on rank {self.rank} of {self.size}, which has not met the other ranks: call `setup()` "
                "first, and nothing after `teardown()`.",
                rank=self.rank,
            )
        return self._store


OF_ALL_REPLICAS = (
    "all replicas of XLA execute the same graph, so they have no `send`, no `recv`, and no `split` into subgroups. Use "
    "an operation of all ranks: `all_to_all`, `all_gather`."
)


def _all_reduce(op: str, tensor: Tensor) -> Tensor:
    """All-reduce out of place: torch_xla loses an in-place all-reduce of views and of modified tensors."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    wider = tensor.dtype is torch.bfloat16 and xr.device_type() == "CPU"  # PJRT's CPU client has no bfloat16 reduction
    reduced: Tensor = xm.all_reduce(op, tensor.float() if wider else tensor, pin_layout=False)
    return reduced.to(tensor.dtype)


def _uploaded(tensor: Tensor) -> Tensor:
    """Copy a tensor to the device. `.to` would make 0 and 1 constants, and the ranks' graphs would differ."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    uploaded: Tensor = xm.send_cpu_data_to_device([tensor], torch_xla.device())[0]
    return uploaded


def _padded(rows: Tensor) -> Tensor:
    length = rows.shape[1]
    wanted = max(_FEWEST, 1 << max(length - 1, 0).bit_length())
    return torch.nn.functional.pad(rows, (0, wanted - length))
