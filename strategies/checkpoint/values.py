"""Plain values as JSON, and back. Loading runs no code, because only the types listed here can be saved.

Preserved exactly: None, bool, int, float (with inf and nan), str, bytes, complex; lists, tuples, dictionaries with any
of these as keys, sets; `torch.Size`, dtypes and devices; paths; NumPy scalars and arrays; the `_metadata` of a module's
state; tensors that are made of tensors; enums, dataclasses and named tuples of classes that torch trusts. Types that
JSON lacks are written as objects whose first key starts with "$".
"""

import base64
import dataclasses
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from fabric.strategies.checkpoint.storage import buffer_of
from fabric.strategies.tensors.nests import NamedFields
from fabric.strategies.tensors.wrapper_subclass import Wrapped, flattened, name_of, trusted

Json: TypeAlias = Any
Keep: TypeAlias = Callable[[str, Any], Json]
"""`(pointer, tensor)`: stores a tensor of the state, and returns its placeholder in the JSON."""
Find: TypeAlias = Callable[[str], Any]
"""`(pointer)`: returns the `Stored` of the tensor with this pointer."""

DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def pointer(parent: str, key: object) -> str:
    """The JSON pointer (RFC 6901) of an entry: `/model/layer.weight`."""
    return f"{parent}/{str(key).replace('~', '~0').replace('/', '~1')}"


def keys_of(pointer: str) -> list[str]:
    """The keys of a JSON pointer, outermost first."""
    return [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]


def encode(value: Any, keep: Keep, is_kept: Callable[[Any], bool], at: str = "") -> Json:
    """A nest of plain values as JSON, with each leaf for which `is_kept` holds replaced by what `keep` returns.

    Raises: TypeError: a value cannot be saved; names its position.
    """
    value = flattened(value)
    if isinstance(value, Wrapped):
        entry = {key: encode(getattr(value, key), keep, is_kept, pointer(at, key)) for key in _PARTS}
        return {"$wrapper": name_of(trusted(value.kind)), **entry}
    if is_kept(value):
        return keep(at, value)
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}

    def inner(key: object, entry: Any) -> Json:
        return encode(entry, keep, (lambda _: False) if type(key) is _Key else is_kept, pointer(at, key))

    write = _WRITERS.get(type(value))
    if write is not None:
        return write(value, inner)
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    fields = _fields(value) if type(value) in torch.serialization.get_safe_globals() else None
    if fields is not None:
        return {"$object": name_of(type(value)), "fields": encode(fields, keep, is_kept, pointer(at, "fields"))}
    found = _numpy(value, lambda tensor: keep(at, tensor)) if type(value).__module__ == "numpy" else None
    if found is not None:
        return found
    kind = name_of(type(value))
    kind += f" of {value.dtype}" if kind == "numpy.ndarray" else ""
    raise TypeError(_UNSAVEABLE.format(at=at or "/", kind=kind))


def decode(json: Json, find: Find, at: str = "") -> Any:
    """The nest that `encode` wrote, with tensors from `find`."""
    if isinstance(json, list):
        return _entries(json, lambda index, entry: decode(entry, find, pointer(at, index)))
    if not isinstance(json, dict):
        return json
    name = next(iter(json), "")
    if not name.startswith("$"):
        return {key: decode(entry, find, pointer(at, key)) for key, entry in json.items()}
    if name not in _READERS:
        raise ValueError(
            f"The value at {at or '/'} has the type {name!r}, which this release cannot read. Use a newer one."
        )
    return _READERS[name](json, lambda key, entry: decode(entry, find, pointer(at, key)), lambda: find(at))


Inner: TypeAlias = Callable[[object, Any], Any]
_PARTS = ("tensors", "context", "size", "stride")
"""Of a `Wrapped`, beside the name of its class."""


@final
class _Key:
    """The place of a key of a dictionary, which cannot have tensors: a placeholder has no place of its own there."""

    def __init__(self, key: object) -> None:
        self._key = key

    def __str__(self) -> str:
        return f"{self._key!r} as key"


def _dict(value: dict[Any, Any], inner: Inner) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(key, entry) for key, entry in value.items()}
    return {"$dict": _items(value, inner)}


def _items(value: dict[Any, Any], inner: Inner) -> Json:
    return [[inner(_Key(key), key), inner(key, entry)] for key, entry in value.items()]


def _ordered(value: OrderedDict[Any, Any], inner: Inner) -> Json:
    metadata = getattr(value, "_metadata", None)
    return {"$ordered": _items(value, inner), "metadata": None if metadata is None else inner("_metadata", metadata)}


def _entries(value: Sequence[Any], inner: Inner) -> list[Any]:
    return list(value) if _are_integers(value) else [inner(index, entry) for index, entry in enumerate(value)]


def _are_integers(value: Sequence[Any]) -> bool:
    """Whether all entries are integers. A shortcut for the state of Python's generator: 625 integers from each rank."""
    return all(type(entry) is int for entry in value)


def _set(value: set[Any] | frozenset[Any], inner: Inner) -> Json:
    name = "$set" if isinstance(value, set) else "$frozenset"
    return {name: [inner(index, entry) for index, entry in enumerate(value)]}


_WRITERS: dict[type, Callable[[Any, Inner], Json]] = {
    dict: _dict,
    OrderedDict: _ordered,
    Counter: lambda value, inner: {"$counter": _items(value, inner)},
    list: lambda value, inner: _entries(value, inner),
    tuple: lambda value, inner: {"$tuple": _entries(value, inner)},
    torch.Size: lambda value, inner: {"$size": list(value)},
    set: _set,
    frozenset: _set,
    bytes: lambda value, inner: {"$bytes": base64.b64encode(value).decode()},
    complex: lambda value, inner: {"$complex": [repr(value.real), repr(value.imag)]},
    torch.dtype: lambda value, inner: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value, inner: {"$device": str(value)},
}


def _pairs(entries: Any, inner: Inner) -> Iterator[tuple[Any, Any]]:
    for key, entry in entries:
        read = inner("", key)
        yield read, inner(read, entry)


def _read_ordered(json: Json, inner: Inner, _: Any) -> OrderedDict[Any, Any]:
    read = OrderedDict(_pairs(json["$ordered"], inner))
    if json["metadata"] is not None:
        read._metadata = inner("_metadata", json["metadata"])  # type: ignore[attr-defined]  # torch's own way
    return read


def _fields(value: Any) -> dict[str, Any] | None:
    """What an enum, a dataclass or a named tuple is made of; None for anything else."""
    if isinstance(value, Enum):
        return {"value": value.value}
    if isinstance(value, tuple) and isinstance(value, NamedFields):
        return {name: getattr(value, name) for name in value._fields}
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
    return None


def _read_array(json: Json, _: Inner, tensor: Callable[[], Any]) -> Any:
    import numpy

    return numpy.frombuffer(buffer_of(tensor().whole()).tobytes(), json["$array"]).reshape(json["shape"]).copy()


def _read_scalar(json: Json, _: Inner, __: Any) -> Any:
    import numpy

    return numpy.frombuffer(base64.b64decode(json["$scalar"][1]), json["$scalar"][0])[0]


_READERS: dict[str, Callable[[Json, Inner, Callable[[], Tensor]], Any]] = {
    "$tensor": lambda json, inner, tensor: tensor(),
    "$float": lambda json, inner, tensor: float(json["$float"]),
    "$dict": lambda json, inner, tensor: dict(_pairs(json["$dict"], inner)),
    "$ordered": _read_ordered,
    "$counter": lambda json, inner, tensor: Counter(dict(_pairs(json["$counter"], inner))),
    "$tuple": lambda json, inner, tensor: tuple(_entries(json["$tuple"], inner)),
    "$size": lambda json, inner, tensor: torch.Size(json["$size"]),
    "$set": lambda json, inner, tensor: {inner(index, each) for index, each in enumerate(json["$set"])},
    "$frozenset": lambda json, inner, tensor: frozenset(inner(i, each) for i, each in enumerate(json["$frozenset"])),
    "$bytes": lambda json, inner, tensor: base64.b64decode(json["$bytes"]),
    "$complex": lambda json, inner, tensor: complex(*map(float, json["$complex"])),
    "$dtype": lambda json, inner, tensor: DTYPES[json["$dtype"]],
    "$device": lambda json, inner, tensor: torch.device(json["$device"]),
    "$path": lambda json, inner, tensor: Path(json["$path"]),
    "$array": _read_array,
    "$scalar": _read_scalar,
    "$wrapper": lambda json, inner, _: Wrapped(kind=json["$wrapper"], **{key: inner(key, json[key]) for key in _PARTS}),
    "$object": lambda json, inner, tensor: trusted(json["$object"])(**inner("fields", json["fields"])),
}


def _numpy(value: Any, keep: Callable[[Tensor], Json]) -> Json:
    """A NumPy scalar or array of numbers; None for anything else."""
    import numpy

    if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        # As bytes, because torch lacks some of NumPy's dtypes. `frombuffer` refuses an empty buffer.
        content = bytearray(value.tobytes())
        keep(torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8))
        return {"$array": value.dtype.str, "shape": list(value.shape)}
    return None


_UNSAVEABLE = (
    "The state has a `{kind}` at {at}, which cannot be saved: reading it back would run code from the file. Save its "
    "contents as numbers, strings, tensors, lists and dictionaries, or an object that has `state_dict` and "
    "`load_state_dict`; leave out what a program makes again, such as a function. An enum, a dataclass or a named "
    "tuple is saved if torch trusts its class: `torch.serialization.add_safe_globals([...])`."
)
