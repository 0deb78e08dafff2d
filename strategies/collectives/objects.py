"""Picklable objects over a collective of tensors.

Tensors anywhere inside a broadcast object are removed while it is pickled, and sent as tensors.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.collectives.collective import Collective, CollectiveError, check_peer
from fabric.strategies.collectives.fabric_calls_check import all_gather_bytes, check_call, to_bytes, to_tensor
from fabric.strategies.tensors.packing import Packing, Spec, groups

# Note [A rank that cannot pickle]
# It sends its error in place of its object, because the other ranks wait for it. The first byte tells which it is.
_OBJECT, _FAILURE = b"\0", b"\1"

_HEADER_BYTES = 512
_INLINE_BYTES = _HEADER_BYTES - 8  # of the pickle, which follows its length in the header


class CarriesObjects(Collective):
    """A collective that sends objects by its own messages: the base class of every collective here."""

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """As in the interface.

        Cost: a hash and 512 bytes, then the rest of a longer pickle, one message for all small tensors of a device, and
        one for each large tensor.
        """
        check_peer("broadcast", "src", src, self.size)
        call = f"broadcast from rank {src}"
        check_call(self, call)
        tensors: list[Tensor] = []
        pickled = _pickled(obj, call, tensors) if self.rank == src else b""
        pickled = _broadcast_bytes(self, pickled, src)
        _raise_failure(pickled, src, self.rank)
        if self.rank == src:
            _send(self, tensors, src)
            return obj
        content = io.BytesIO(pickled[1:])
        specs = [Spec(*fields) for fields in pickle.load(content)]
        return _Assembler(content, _receive(self, specs, src)).load()

    def all_gather_object(self, obj: Any) -> list[Any]:
        """As in the interface. Cost: a hash, a length, and W times the longest pickle."""
        call = "all_gather of objects"
        pickled = _pickled(obj, call, None)
        check_call(self, call)
        contents = all_gather_bytes(self, pickled)
        for rank, content in enumerate(contents):
            _raise_failure(content, rank, self.rank)
        return [pickle.loads(content[1:]) for content in contents]


def _broadcast_bytes(collective: Collective, mine: bytes, src: int) -> bytes:
    """Return the bytes of rank `src` on every rank: one message with their length and start, then the rest if
    needed."""
    header = bytearray(len(mine).to_bytes(8, "little") + mine[:_INLINE_BYTES]).ljust(_HEADER_BYTES, b"\0")
    received = to_bytes(collective.broadcast(to_tensor(header), src))
    length = int.from_bytes(received[:8], "little")
    start = received[8 : 8 + min(length, _INLINE_BYTES)]
    rest = bytearray(mine[_INLINE_BYTES:] or max(length - _INLINE_BYTES, 0))
    return start + to_bytes(collective.broadcast(to_tensor(rest), src)) if rest else start


def _pickled(obj: Any, call: str, tensors: list[Tensor] | None) -> bytes:
    """A status byte, the specs of the tensors moved into `tensors`, and the pickle of `obj` without them."""
    try:
        if tensors is None:
            return _OBJECT + pickle.dumps(obj)
        rest = io.BytesIO()
        _Dismantler(rest, tensors).dump(obj)
        specs = [Spec.of(tensor) for tensor in tensors]
        return _OBJECT + pickle.dumps([(s.dtype, s.shape, s.device_type) for s in specs]) + rest.getvalue()
    except Exception as error:  # whatever the object's own code raises
        words = f"`{call}`: a {type(obj).__name__} cannot be pickled: {type(error).__name__}: {error}"
        return _FAILURE + words.encode()


def _raise_failure(pickled: bytes, src: int, rank: int) -> None:
    if pickled[:1] == _FAILURE:
        raise CollectiveError(f"Rank {src} sent nothing: {pickled[1:].decode()}", rank=rank)


def _send(collective: Collective, tensors: Sequence[Tensor], src: int) -> None:
    specs = [Spec.of(tensor) for tensor in tensors]
    together, alone = groups((spec.num_bytes for spec in specs), (spec.device_type for spec in specs))
    for indices in together:
        collective.broadcast(Packing([specs[i] for i in indices]).pack([tensors[i] for i in indices]), src)
    for index in alone:
        collective.broadcast(tensors[index], src)


def _receive(collective: Collective, specs: Sequence[Spec], src: int) -> list[Tensor]:
    together, alone = groups((spec.num_bytes for spec in specs), (spec.device_type for spec in specs))
    received: dict[int, Tensor] = {}
    for indices in together:
        packing = Packing([specs[i] for i in indices])
        spec = Spec(torch.uint8, (packing.num_bytes,), specs[indices[0]].device_type)
        row = collective.broadcast(spec.like(collective.device), src)
        received.update(zip(indices, (rows[0] for rows in packing.unpack(row[None])), strict=True))
    for index in alone:
        received[index] = collective.broadcast(specs[index].like(collective.device), src)
    return [received[index] for index in range(len(specs))]


@final
class _Dismantler(pickle.Pickler):
    """Replaces each tensor by a number. A tensor that occurs twice is one tensor at the receiver, too."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, bool | None] | None:
        if type(obj) is not Tensor and type(obj) is not nn.Parameter:
            return None
        if obj.layout is not torch.strided or obj.is_quantized or obj.device.type == "meta":
            return None  # rare, and not one block of numbers: pickled in its own way
        index = self._index.get(id(obj))
        if index is None:
            index = self._index[id(obj)] = len(self._tensors)
            self._tensors.append(obj)
        return index, obj.requires_grad if type(obj) is nn.Parameter else None


@final
class _Assembler(pickle.Unpickler):
    """Puts the tensors back in place of their numbers."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: tuple[int, bool | None]) -> Tensor:
        index, requires_grad = pid
        if requires_grad is not None and type(self._tensors[index]) is not nn.Parameter:
            self._tensors[index] = nn.Parameter(self._tensors[index], requires_grad)
        return self._tensors[index]
