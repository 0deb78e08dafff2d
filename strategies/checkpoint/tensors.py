"""The tensors of a state: their shards on this rank, to be saved (`TensorShards`); their bytes in a checkpoint, which
are read when they are needed (`Stored`); and copies on the CPU (`snapshot`)."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.values import DTYPES
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.chunk import Chunk, Shape, chunks_of_range, whole
from fabric.strategies.tensors.nests import leaves_in, map_leaves, map_only_tensors, tensors_in
from fabric.strategies.tensors.wrapper_subclass import Wrapped, is_wrapped, on_cpu, plain_tensors, unflattened

if TYPE_CHECKING:
    from fabric.strategies.checkpoint.manifest import Entry, Piece

_SMALL_BYTES = 2**20
"""Tensors up to this size are always copied."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorShards:
    """One tensor of a model or an optimizer, as it is sharded or replicated over ranks."""

    shape: Shape
    """Of the whole tensor."""
    dtype: torch.dtype
    shards: tuple[tuple[Chunk, Tensor], ...]
    """The chunks that this rank holds, each with its elements, a tensor of the chunk's shape in the model's memory."""
    holders: tuple[int, ...]
    """The ranks that hold the same chunks, in ascending order. Each chunk is written by one of them."""


def replicated(tensor: Tensor, holders: Sequence[int]) -> TensorShards:
    """A tensor that each of these ranks holds whole."""
    shape = tuple(tensor.shape)
    return TensorShards(shape, tensor.dtype, ((whole(shape), tensor.detach()),), tuple(holders))


def no_shards(shape: Sequence[int], dtype: torch.dtype) -> TensorShards:
    """A tensor that has no shard on this rank."""
    return TensorShards(tuple(shape), dtype, (), ())


def of_all_ranks(collective: Collective, nest: Any) -> list[Any]:
    """The nests of all ranks with a `TensorShards` for each tensor: whole in that of this rank, and without elements in
    those of other ranks. Ranks: all. Cost: each rank receives shapes and dtypes, about 100 bytes for each tensor."""
    return [each for each, _ in of_all_ranks_with(collective, nest, None)]


def of_all_ranks_with(collective: Collective, nest: Any, beside: Any) -> list[tuple[Any, Any]]:
    """The same, and what each rank has `beside` its nest, as it is: in one message."""
    without = map_only_tensors(lambda each: no_shards(each.shape, each.dtype), nest)
    found = collective.all_gather_object((without, beside))
    found[collective.rank] = map_only_tensors(lambda each: replicated(each, (collective.rank,)), nest), beside
    return found


def flat_shard(shape: Sequence[int], start: int, elements: Tensor, rank: int) -> TensorShards:
    """A tensor whose `elements` only this rank holds: 1-dim, from the index `start` of the flattened tensor on.

    Elements beyond the end are padding, which is not saved.
    """
    shape = tuple(shape)
    stop = min(start + elements.numel(), math.prod(shape))
    shards = []
    taken = 0
    for chunk in chunks_of_range(shape, start, stop):
        shards.append((chunk, elements.detach()[taken : taken + chunk.numel].view(chunk.shape)))
        taken += chunk.numel
    return TensorShards(shape, elements.dtype, tuple(shards), (rank,))


@torch.no_grad()
def gathered(collective: Collective, content: Any) -> Any:
    """The nest on rank 0 with whole tensors in place of `TensorShards`, on the CPU unless rank 0 holds one whole; `{}`
    on the other ranks. A value that is in several places stays one.

    Ranks: all, with a `TensorShards` of the same tensor in the same place.
    Cost: each rank sends rank 0 the chunks that no lower rank holds, one at a time.
    """
    shards = {id(each): each for each in leaves_in(content, lambda leaf: isinstance(leaf, TensorShards))}
    own = [(each.shape, [chunk for chunk, _ in each.shards]) for each in shards.values()]
    of_ranks = collective.all_gather_object(own)
    if any([shape for shape, _ in each] != [shape for shape, _ in of_ranks[0]] for each in of_ranks):
        raise ValueError("The ranks have different objects, or tensors of other shapes. Pass the same on all ranks.")
    whole_of = {}
    for (key, each), held in zip(shards.items(), zip(*of_ranks, strict=True), strict=True):
        whole_of[key] = _on_rank_zero(collective, each, [chunks for _, chunks in held])

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, Wrapped):
            return unflattened(leaf, filled)
        return whole_of[id(leaf)] if isinstance(leaf, TensorShards) else leaf

    is_leaf = (TensorShards, Wrapped, Tensor)
    return map_leaves(filled, content, is_leaf=lambda leaf: isinstance(leaf, is_leaf)) if collective.rank == 0 else {}


def _on_rank_zero(collective: Collective, tensor: TensorShards, held: Sequence[Sequence[Chunk]]) -> Tensor | None:
    """The whole tensor on rank 0. `held`: the chunks of each rank."""
    parts, everything, rank = dict(tensor.shards), whole(tensor.shape), collective.rank
    if rank == 0 and everything in parts:
        return parts[everything]
    made = torch.empty(tensor.shape if rank == 0 else 0, dtype=tensor.dtype, device="cpu")
    senders: dict[Chunk, int] = {}
    for number, chunks in enumerate(held):
        for chunk in chunks:
            senders.setdefault(chunk, number)
    for chunk, sender in senders.items() if everything not in held[0] else ():
        if sender == rank != 0:
            collective.send(parts[chunk].to("cpu"), 0)
        elif rank == 0:
            like = torch.empty(chunk.shape, dtype=tensor.dtype, device="cpu")
            made[chunk.slices_in(everything)].copy_(parts[chunk] if sender == 0 else collective.recv(like, sender))
    return made


def memory_of(part: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that share their memory. On devices without addresses, each tensor is distinct."""
    return part.data_ptr() or id(part), part.dtype, tuple(part.shape), part.stride()


@final
class Stored:
    """A tensor in a checkpoint. Its bytes are not read until they are needed."""

    def __init__(self, pointer: str, entry: "Entry", open_file: Callable[[str], Tensor]) -> None:
        self.pointer = pointer
        self.shape: Shape = entry.shape
        self.dtype = DTYPES[entry.dtype]
        self._pieces = entry.pieces
        self._open_file = open_file

    @property
    def location(self) -> Hashable:
        """Where its bytes are: equal for tied tensors, which were saved once."""
        pieces = frozenset(each for each in self._pieces if each.chunk.numel)
        return (self.shape, self.dtype, pieces) if pieces else self.pointer

    def kept(self, chunk: Chunk) -> Tensor:
        """The elements of a chunk in new memory, to be kept."""
        made = torch.empty(chunk.shape, dtype=self.dtype, device="cpu")
        self.fill(made, chunk)
        return made

    def whole(self) -> Tensor:
        """The whole tensor, in new memory or mapped: to be copied from."""
        return self.part(whole(self.shape))

    def part(self, chunk: Chunk) -> Tensor:
        """The elements of a chunk: mapped if one piece contains them all, otherwise assembled. To be copied from."""
        for piece in self._pieces:
            if piece.chunk.intersection(chunk) == chunk:
                return self._elements(piece)[chunk.slices_in(piece.chunk)]
        return self.kept(chunk)

    @torch.no_grad()
    def fill(self, target: Tensor, chunk: Chunk) -> None:
        """Copy the elements of a chunk into `target`."""
        for piece in self._pieces:
            shared = piece.chunk.intersection(chunk)
            if shared is not None:
                target[shared.slices_in(chunk)].copy_(self._elements(piece)[shared.slices_in(piece.chunk)])

    def _elements(self, piece: "Piece") -> Tensor:
        num_bytes = piece.chunk.numel * self.dtype.itemsize
        content = self._open_file(piece.file)[piece.offset_bytes : piece.offset_bytes + num_bytes]
        return content.view(self.dtype).view(piece.chunk.shape)


def shown(entry: Any) -> Any:
    """What a filter receives: of a tensor in shards, or in a checkpoint, the whole on the device "meta"."""
    is_tensor = isinstance(entry, (Stored, TensorShards))
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta") if is_tensor else entry


def in_memory(content: Any, *, mapped: bool = False) -> Any:
    """A nest with each `Stored` read whole: in new memory, or (`mapped`) mapped, to be copied from and dropped."""

    def read(leaf: Any) -> Any:
        if isinstance(leaf, Wrapped):
            return unflattened(leaf, read)
        if not isinstance(leaf, Stored):
            return leaf
        return leaf.whole() if mapped else leaf.kept(whole(leaf.shape))

    return map_leaves(read, content, is_leaf=lambda leaf: isinstance(leaf, (Stored, Wrapped)))


def mapped_module(content: Any, *, but: Collection[str] = ()) -> Any:
    """The state of a module with its tensors mapped, for torch to copy from; `but`: names of entries that stay."""
    if not isinstance(content, dict):
        return in_memory(content, mapped=True)
    state = copy(content)
    for name, value in content.items():
        # A module keeps its extra state, which is therefore read into memory.
        state[name] = value if name in but else in_memory(value, mapped=not is_extra_state(name))
    return state


def is_extra_state(name: str) -> bool:
    """Whether the entry is what a submodule's `get_extra_state` returned, of any type that can be saved."""
    return name.rpartition(".")[2] == "_extra_state"


def snapshot(content: Any, owners: Iterable[nn.Module | Optimizer], local: Callable[[Tensor], Tensor]) -> Any:
    """A nest of plain containers with each tensor on the CPU, sharing no memory with `owners`; tied tensors stay tied.

    Tensors that a strategy gathered for this call are not copied again. `local`: returns this rank's part of a tensor.
    """
    held = (local(tensor) for owner in owners for tensor in _tensors_of(owner))
    plain = (each for tensor in held for each in plain_tensors(tensor).values())
    on_the_cpu = (tensor for tensor in plain if tensor.device.type == "cpu")  # XLA's storages have no address
    live = {_storage(tensor) for tensor in on_the_cpu if tensor.untyped_storage().nbytes() > _SMALL_BYTES}
    known: dict[Any, tuple[Tensor, Tensor]] = {}

    def copied(tensor: Tensor) -> Tensor:
        if is_wrapped(tensor):
            return on_cpu(tensor)
        if tensor.device.type == "cpu" and tensor.nbytes > _SMALL_BYTES and _storage(tensor) not in live:
            return tensor.detach()
        key = memory_of(tensor)
        if key not in known:  # the original is kept, so that no other tensor gets its memory
            own = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            known[key] = (tensor, own)
        return known[key][1]

    return map_only_tensors(copied, content)


def _tensors_of(owner: nn.Module | Optimizer) -> list[Tensor]:
    if isinstance(owner, nn.Module):
        return [*owner.parameters(), *owner.buffers()]
    return tensors_in([list(owner.state.values()), owner.param_groups])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
