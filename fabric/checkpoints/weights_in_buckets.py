"""The whole weights of a model, one bucket after another, under every strategy: `Fabric.weights`.

A bucket is gathered completely before its first tensor is yielded, so no rank waits for another within a bucket. A rank
that leaves its loop early takes part in the remaining buckets until all ranks have left. Made of the shards that a
checkpoint is made of (`StateAccess.read_module`); tensors that every rank holds whole are copied, not sent.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from itertools import accumulate, chain, groupby
from operator import add
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from fabric.strategies.checkpoint.state import StateAccess
from fabric.strategies.checkpoint.tensors import TensorShards, memory_of, replicated
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.chunk import Chunk, Shape, chunks_of_range, whole
from fabric.strategies.tensors.dtensor import user_class
from fabric.strategies.tensors.wrapper_subclass import is_wrapped, plain_tensors

_ALIGNMENT_BYTES = 16
"""Of each chunk in a message: the size of the largest dtype, so that a message is read in place."""

_MESSAGES = 4
"""That a bucket is sent in, unless a rank's part of them has less than `_LEAST_BYTES`."""

_LEAST_BYTES = 2**14


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank holds of a tensor."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    tied_to: str | None
    """An earlier name of the same memory on this rank."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A tensor to be gathered."""

    name: str
    shape: Shape
    dtype: torch.dtype
    holders: Mapping[Chunk, tuple[int, ...]]
    layer: str | None
    """The path of the layer with adapters that it belongs to, whose tensors are gathered in one bucket."""


class _Piece(NamedTuple):
    """The elements `part` of a chunk, from `start` to `stop` in the bytes of a message. `number`: of the tensor in its
    bucket."""

    number: int
    chunk: Chunk
    part: Chunk
    start: int
    stop: int


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """What `Fabric.weights` was asked for."""

    dtype: torch.dtype | None
    bucket_bytes: int
    prefix: str
    dequantize: bool
    merge_adapters: bool


def weights(runtime: Runtime, module: nn.Module, access: StateAccess, wanted: Wanted) -> Iterator[tuple[str, Tensor]]:
    """See `Fabric.weights`. Ranks: all, with the same arguments. The plan is made now, and buckets as they are read."""
    collective, dtype = runtime.collective, wanted.dtype
    with torch.inference_mode(False), torch.no_grad():
        held = access.read_module(module)
    in_four_bits = _in_four_bits(module, wanted)
    if wanted.dequantize or wanted.merge_adapters:
        held = _unquantised(module, held, tuple(f"{name}." for name in in_four_bits))
    own = {
        name: value if isinstance(value, TensorShards) else replicated(value, (0,) if collective.rank == 0 else ())
        for name, value in held.items()
        if isinstance(value, (Tensor, TensorShards))
    }
    adapters = _Adapters(module, merges=wanted.merge_adapters)
    parts = collective.all_gather_object(_described(module, own, collective.rank))
    buckets = list(_filled(_planned(parts, adapters.layers, in_four_bits, dtype), wanted.bucket_bytes))
    any_rank = partial(collective.reduce_boolean_decision, require_all=False)

    def read(bucket: Sequence[_Planned]) -> list[tuple[str, Tensor]]:
        with torch.inference_mode(False), torch.no_grad():
            gathered = _gather(collective, runtime.device, own, bucket)
            return adapters.merged([*zip(bucket, gathered, strict=True)])[::-1]

    def converted(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        quantised = in_four_bits.get(name)
        if wanted.dequantize or quantised is None:
            with torch.inference_mode(False):
                if quantised is not None:
                    tensor = import_module("bitsandbytes.functional").dequantize_4bit(tensor, quantised)
                tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        return wanted.prefix + name, tensor

    def read_all() -> Iterator[tuple[str, Tensor]]:
        remaining = iter(buckets)
        try:
            yield "", torch.empty(0)
            for bucket in remaining:
                any_rank(True)
                pairs = read(bucket)
                while pairs:
                    yield converted(*pairs.pop())  # without a reference to a tensor that the loop has dropped
        except GeneratorExit:  # the loop of this rank has ended: it gathers until no rank reads
            for bucket in remaining:
                if not any_rank(False):
                    break
                read(bucket)
            raise

    reading = read_all()
    next(reading)  # started, so that it takes part in the buckets of others even where this rank reads none
    return reading


def _described(module: nn.Module, own: Mapping[str, TensorShards], rank: int) -> dict[str, _Part]:
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    present = {name: id(each) for name, each in named}  # XLA's tensors have no address in memory
    known: dict[Any, str] = {}
    described = {}
    for name, each in own.items():
        shards = each.shards if rank in each.holders else ()
        memory = (each.shape, *(memory_of(part) for _, part in shards))
        first = known.setdefault(present.get(name, name), name)
        first = known.setdefault(memory, first) if shards else first
        chunks = tuple(chunk for chunk, _ in shards)
        described[name] = _Part(
            shape=each.shape, dtype=each.dtype, chunks=chunks, tied_to=None if first == name else first
        )
    return described


def _planned(
    parts: Sequence[Mapping[str, _Part]],
    layers: Mapping[str, nn.Module],
    in_four_bits: Collection[str],
    dtype: torch.dtype | None,
) -> Iterator[_Planned]:
    """All tensors in rank 0's order, each with the ranks that hold its chunks; tied ones once."""
    for name in dict.fromkeys(name for of_rank in parts for name in of_rank):
        found = {rank: of_rank[name] for rank, of_rank in enumerate(parts) if name in of_rank}
        if any(each.tied_to is not None for each in found.values()):
            continue
        holders: dict[Chunk, tuple[int, ...]] = {}
        for rank, each in found.items():
            holders.update({chunk: (*holders.get(chunk, ()), rank) for chunk in each.chunks})
        first = next((each for each in found.values() if each.chunks), next(iter(found.values())))
        prefixes = accumulate(name.split("."), "{}.{}".format)
        layer = next((path for path in prefixes if path in layers), None)
        is_kept = layer is not None or name in in_four_bits or not first.dtype.is_floating_point
        kept = first.dtype if is_kept or dtype is None else dtype
        yield _Planned(name=name, shape=first.shape, dtype=kept, holders=holders, layer=layer)


def _filled(tensors: Iterator[_Planned], bucket_bytes: int) -> Iterator[list[_Planned]]:
    """Buckets of at most so many bytes, or of one tensor or one layer with adapters that is larger."""
    bucket: list[_Planned] = []
    filled = 0
    for each in tensors:
        num_bytes = whole(each.shape).numel * each.dtype.itemsize
        continues = bucket and each.layer is not None and bucket[-1].layer == each.layer
        if bucket and not continues and filled + num_bytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(each)
        filled += num_bytes
    if bucket:
        yield bucket


# Note [What a bucket costs]
# A bucket is sent in several messages. At the peak a rank has the bucket's whole tensors and one message, as it was
# packed and as it was received (which gloo does in memory of its own, beside the result): less than two buckets. Ranks
# that hold nearly equal parts send them in one all-gather. Otherwise, as where a stage of a pipeline holds all of it,
# each holder broadcasts its part: to fill up the messages of the others would take as many times the memory as there
# are ranks.


def _gather(
    collective: Collective, device: torch.device, own: Mapping[str, TensorShards], bucket: Sequence[_Planned]
) -> list[Tensor]:
    """The whole tensors of a bucket, in new memory. Ranks: all, with the same bucket."""
    made = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in bucket]

    @lru_cache(maxsize=1)
    def held(index: int, chunk: Chunk) -> Tensor:
        tensor = dict(own[bucket[index].name].shards)[chunk]
        return tensor.dequantize() if is_wrapped(tensor) else tensor

    def elements(row: Tensor, piece: _Piece) -> Tensor:
        dtype = bucket[piece.number].dtype
        return row[piece.start :].view(dtype)[: piece.part.numel].view(piece.part.shape)

    def packed(pieces: Sequence[_Piece], num_bytes: int) -> Tensor:
        row = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for piece in pieces:
            elements(row, piece).copy_(held(piece.number, piece.chunk)[piece.part.slices_in(piece.chunk)])
        return row

    def exchange(message: Mapping[int, Sequence[_Piece]]) -> None:
        mine, longest = message.get(collective.rank, ()), max(pieces[-1].stop for pieces in message.values())
        rows = collective.all_gather(packed(mine, longest)) if is_even else None
        for rank, pieces in message.items():
            sent = mine if rank == collective.rank else ()
            row = collective.broadcast(packed(sent, pieces[-1].stop), src=rank) if rows is None else rows[rank]
            for piece in pieces:
                everything = whole(bucket[piece.number].shape)
                made[piece.number][piece.part.slices_in(everything)].copy_(elements(row, piece))

    sent: dict[int, list[tuple[int, Chunk]]] = {}
    for index, each in enumerate(bucket):
        for chunk, holders in each.holders.items():
            if len(holders) < collective.size:
                sent.setdefault(holders[0], []).append((index, chunk))
            else:
                made[index][chunk.slices_in(whole(each.shape))].copy_(held(index, chunk))
    lengths = [sum(chunk.numel * bucket[index].dtype.itemsize for index, chunk in chunks) for chunks in sent.values()]
    is_even = 4 * max(lengths, default=0) * collective.size <= 5 * sum(lengths)
    most = max(sum(lengths) // _MESSAGES // (collective.size if is_even else 1), _LEAST_BYTES)
    messages = {rank: list(_messages(bucket, chunks, most)) for rank, chunks in sent.items()}
    for number in range(max(map(len, messages.values()), default=0)):
        exchange({rank: mine[number] for rank, mine in messages.items() if number < len(mine)})
    return made


def _messages(
    bucket: Sequence[_Planned], chunks: Sequence[tuple[int, Chunk]], num_bytes: int
) -> Iterator[list[_Piece]]:
    """What one rank sends of a bucket, in messages of about so many bytes."""
    pieces: list[_Piece] = []
    filled = 0
    for number, chunk in chunks:
        itemsize, start = bucket[number].dtype.itemsize, 0
        while start < chunk.numel:
            stop = min(start + max((num_bytes - filled) // itemsize, 1), chunk.numel)
            for part in chunks_of_range(chunk.shape, start, stop):
                there = Chunk(tuple(map(add, chunk.offsets, part.offsets)), part.shape)
                begin, filled = filled, filled + -(-part.numel * itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                pieces.append(_Piece(number, chunk, there, begin, filled))
            start = stop
            if filled >= num_bytes:
                yield pieces
                pieces, filled = [], 0
    if pieces:
        yield pieces


def _unquantised(module: nn.Module, held: Mapping[str, Any], left_out: tuple[str, ...]) -> dict[str, Any]:
    """The state with each wrapped tensor in place of its plain ones; it is dequantised when it is sent.

    `left_out`: beginnings of names."""
    wrapped = {
        key: (name, each.detach())
        for name, each in module.named_parameters(remove_duplicate=False)
        if is_wrapped(each)
        for key in plain_tensors(each.detach(), name)
    }
    return dict(wrapped.get(key, (key, value)) for key, value in held.items() if not key.startswith(left_out))


def _in_four_bits(module: nn.Module, wanted: Wanted) -> dict[str, Any]:
    """How bitsandbytes has quantised its weights in 4 bits, by their names. They are gathered as they are stored."""
    found = {}
    for path, part in module.named_modules(remove_duplicate=False):
        weight = part._parameters.get("weight")
        if weight is not None and any(kind.__module__.startswith("bitsandbytes.") for kind in type(part).__mro__):
            state = getattr(weight, "quant_state", None) or getattr(part, "quant_state", None)
            if state is not None:
                found[f"{path}.weight".lstrip(".")] = state
            elif wanted.dequantize and not weight.is_floating_point():
                raise ValueError(_NOT_IN_FOUR_BITS.format(layer=path, kind=type(part).__name__))
    if found and wanted.merge_adapters:
        raise ValueError(_NOT_MERGED.format(name=next(iter(found))))
    return found


_NOT_IN_FOUR_BITS = (
    "`fabric.weights(model, dequantize=True)`: `{layer}` is a `{kind}` of bitsandbytes; only 4 bits are dequantised. "
    "Use `Linear4bit`, or leave `dequantize` out, and dequantise what is sent."
)
_NOT_MERGED = (
    "`fabric.weights(model, merge_adapters=True)`: bitsandbytes has quantised `{name}`, and would round the sum. "
    "Send the base with `dequantize=True`, and the adapter by itself, and merge them where they arrive."
)


@final
class _Adapters:
    """The layers of a model of peft that have adapters, and the weights into which these are merged.

    Each layer is merged by its own `merge`, in a copy of its modules that has the whole tensors: nothing changes in the
    model. Names and values are those of `model.merge_and_unload().state_dict()`.
    """

    def __init__(self, module: nn.Module, *, merges: bool) -> None:
        named = dict(module.named_modules(remove_duplicate=False)) if merges else {}
        self.layers = {
            path: part
            for path, part in named.items()
            if callable(getattr(part, "merge", None)) and isinstance(getattr(part, "base_layer", None), nn.Module)
        }
        if merges and not self.layers:
            raise ValueError(
                f"`fabric.weights(model, merge_adapters=True)`: `{type(module).__name__}` has no layer with adapters, "
                "a module with a `base_layer` and a method `merge`, as those of peft. Leave `merge_adapters` out."
            )
        self._root = "base_model.model." if "base_model.model" in named else ""
        self._replaced = {
            f"{path}.": f"{path}.modules_to_save.{part.active_adapters[0]}."
            for path, part in named.items()
            if isinstance(getattr(part, "modules_to_save", None), nn.ModuleDict) and "original_module" in part._modules
        }

    def merged(self, found: Sequence[tuple[_Planned, Tensor]]) -> list[tuple[str, Tensor]]:
        """The tensors of a bucket under the names of the model without adapters."""
        pairs: dict[str, Tensor] = {}
        for layer, members in groupby(found, lambda each: each[0].layer):
            if layer is None:
                named = ((self._name(each.name), tensor) for each, tensor in members)
                pairs.update({name: tensor for name, tensor in named if name is not None})
            else:
                tensors = {each.name.removeprefix(f"{layer}."): tensor for each, tensor in members}
                copied: Any = _copy_of(self.layers[layer], tensors)
                copied.merge(adapter_names=list(copied.active_adapters))
                for name, tensor in copied.base_layer.state_dict().items():
                    pairs[f"{layer}.{name}"] = tensor.dequantize() if is_wrapped(tensor) else tensor
        return [(name.removeprefix(self._root), tensor) for name, tensor in pairs.items()]

    def _name(self, name: str) -> str | None:
        """The name without the wrapper of `modules_to_save`; None for the module that it replaces."""
        for path, active in self._replaced.items():
            if name.startswith(path):
                return path + name.removeprefix(active) if name.startswith(active) else None
        return name


def _copy_of(part: nn.Module, tensors: Mapping[str, Tensor], path: str = "") -> nn.Module:
    """A copy of a module and its submodules with these tensors, without hooks and the strategy's code."""
    kind = user_class(part)
    made: nn.Module = object.__new__(kind)
    for name, value in vars(part).items():
        copied = dict(value) if isinstance(value, dict) else list(value) if type(value) is list else value
        if name != "forward":
            vars(made)[name] = {} if name.endswith("_hooks") else copied
    for name, parameter in part._parameters.items():
        if parameter is not None:
            made._parameters[name] = nn.Parameter(tensors[path + name], requires_grad=False)
    for name in part._buffers:
        made._buffers[name] = tensors.get(path + name, part._buffers[name])
    for name, child in part._modules.items():
        made._modules[name] = None if child is None else _copy_of(child, tensors, f"{path}{name}.")
    return made
