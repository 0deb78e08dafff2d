"""A collective of one rank: the same shape rule and errors as the others, without communication."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import Collective, ReduceOp, check_peer, check_slices, check_split
from fabric.strategies.collectives.dtypes import from_reduced, to_reducible
from fabric.strategies.collectives.objects import CarriesObjects
from fabric.strategies.tensors.packing import check_dense


@final
class SingleDeviceCollective(CarriesObjects):
    """The only rank of a world of one."""

    rank = 0
    size = 1

    def setup(self) -> None:
        pass

    def teardown(self) -> None:
        pass

    def barrier(self) -> None:
        pass

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_peer("broadcast", "src", src, 1)
        check_dense(tensor)
        return tensor.detach()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return from_reduced(to_reducible(tensor, op, copy=True), op, tensor.dtype, 1)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return _copied(tensor)[None]

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        check_slices("reduce_scatter", tensor, 1)
        return self.all_reduce(tensor[0], op)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        check_slices("all_to_all", tensor, 1)
        return _copied(tensor)

    def send(self, tensor: Tensor, dst: int) -> None:
        check_peer("send", "dst", dst, 1, me=0)

    def recv(self, like: Tensor, src: int) -> Tensor:
        check_peer("recv", "src", src, 1, me=0)
        raise AssertionError("a world of one has no other rank")

    def split(self, ranks: Sequence[int]) -> Collective | None:
        check_split(ranks, 1, is_part=False)
        return self

    def store(self) -> None:
        return None


def _copied(tensor: Tensor) -> Tensor:
    check_dense(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
