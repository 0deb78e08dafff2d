"""The last collectives of this process, whoever called them, from torch's flight recorder.

It records all calls on a process group, so also those of DDP, FSDP and DeepSpeed. It does not record `send` and `recv`
on gloo, nor calls of Horovod or XLA. Measured on gloo (torch 2.13): `is_waiting` takes 70 us.
"""

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch._C._distributed_c10d as c10d

from fabric.launchers.process.stack import frames_of, is_within, users_line
from fabric.launchers.watch.table import WORLD, Call

_DUMPS: list[Callable[..., bytes]] = [
    getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if name in dir(c10d)
]
"""Torch has a recorder for NCCL, and one for all other backends; a build without CUDA has only the second."""


_UNNAMED = {"Byte": torch.uint8, "Char": torch.int8}
"""The dtypes to which torch gives no second name, such as `torch.double`."""


@final
class FlightRecorder:
    """The calls that torch has recorded; none if torch was built without a recorder, or if the first process group was
    created earlier. The first instance of a process turns the recorder on, if the environment says so."""

    def __init__(self) -> None:
        _read(calls=False)

    def is_waiting(self) -> bool:
        """Whether some process group has a call that is not finished."""
        groups = [group for found in _read(calls=False) for group in found.get("pg_status", {}).values()]
        return any(group["last_enqueued_collective"] != group["last_completed_collective"] for group in groups)

    def calls(self, *, with_lines: bool) -> Sequence[Call]:
        """The recorded calls, oldest first, numbered per process group and rank; lines where they can be read."""
        recorded = _read(calls=True, stacks=with_lines and _can_read_stacks())
        calls = [self._call(entry) for found in recorded for entry in found.get("entries", ())]
        return sorted(calls, key=lambda call: call.started_ns)

    def _call(self, entry: Mapping[str, Any]) -> Call:
        name, description = entry["process_group"]
        group = (
            WORLD if description == "default_pg" else name if description == "undefined" else f"{name} ({description})"
        )
        backend = str(entry["profiling_name"]).partition(":")[0]  # each backend of a group counts its own calls
        frames = ((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ()))
        return Call(
            group=group if backend == "gloo" else f"{group} over {backend}",
            number=entry["collective_seq_id"],
            operation=_operation(entry),
            where=users_line(frames),
            started_ns=entry["time_created_ns"],
            timeout_seconds=entry.get("timeout_ms", 0) / 1e3,
            pending=not entry["retired"],
            is_on_device=backend != "gloo",
            device_seconds=entry["duration_ms"] / 1e3 if entry.get("duration_ms") is not None else None,
        )


def _read(*, calls: bool, stacks: bool = False) -> list[Mapping[str, Any]]:
    """The content of each recorder; without `calls` only the progress of each group."""
    return [pickle.loads(dump(calls, stacks, False)) for dump in _DUMPS]  # pickled by torch in this process


def _can_read_stacks() -> bool:
    """Whether torch can write stacks without importing dynamo.

    To write a stack, torch 2.13 imports `torch._inductor.codecache`, and with it 800 modules of dynamo. In a thread
    that takes seconds, and it fails in both threads if the main thread imports dynamo at that time, as the first
    optimizer does.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    return not any(
        is_within(frames_of(frame), "importlib._bootstrap>", ("_find_and_load",))
        for frame in sys._current_frames().values()
    )


def _operation(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    tensors = [
        f"{_dtype(dtype)} {tuple(shape)}"
        for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    ]
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return f"{name} of {', '.join(tensors[:3])}{more}" if tensors else name


def _dtype(name: str) -> str:
    return str(_UNNAMED.get(name) or vars(torch).get(name.lower(), name)).removeprefix("torch.")
