"""The private names of torch_xla that are used, checked at import.

Imports torch_xla: import it within a function, in a rank alone.
"""

from typing import Any

import torch_xla
from torch_xla._internal import pjrt, tpu

from fabric.launchers.private_names import Names, require

NAMES: Names = {
    "torch_xla": {"_XLAC": "the functions in C++"},
    "torch_xla._XLAC": {
        "_xla_get_device_ordinal": "the rank that PJRT gives to a device",
        "_xla_set_default_device": "the device of a thread",
        "_xla_runtime_is_initialized": "whether this process holds the devices; asking in public opens them",
        "_get_xla_sharding_spec _get_xla_op_sharding _xla_mark_sharding": (
            "how a tensor is sharded over devices, and the same for another one: `mark_sharding` cannot copy it"
        ),
    },
    "torch_xla._internal.pjrt": {"initialize_multiprocess": "tells PJRT which process of the host this is"},
    "torch_xla._internal.tpu": {
        "num_available_chips num_available_devices": "the TPU of this host, without opening it"
    },
}

require("torch-xla", "2.9", NAMES)

native: Any = torch_xla._XLAC
initialize_multiprocess = pjrt.initialize_multiprocess


def num_tpu_devices() -> int:
    """Devices of the TPU of this host, which are not opened; 0 without one."""
    return int(tpu.num_available_chips() and tpu.num_available_devices())


def runtime_is_initialized() -> bool:
    """Whether this process has used a device: then it holds all of them."""
    return bool(native._xla_runtime_is_initialized())


def sharding_of(tensor: Any) -> str:
    """The tensor's sharding over the devices, as XLA writes it; empty if it has none."""
    return str(native._get_xla_sharding_spec(tensor))
