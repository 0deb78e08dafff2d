"""The variables of PJRT, through which torch_xla uses its devices, and of the ranks that it started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from fabric.launchers.environments.environment import Environment, Variables
from fabric.launchers.world import Rendezvous, World

PORT = 12355
"""The port of torch_xla's own rendezvous if MASTER_PORT is not set."""


@final
@dataclass(frozen=True, slots=True)
class PJRT:
    """The chosen client of PJRT. Neither imports torch_xla nor initialises a device."""

    client: str | None
    """TPU or CPU; None if PJRT_DEVICE is not set."""
    num_cpu_devices: int
    """The number of devices of the CPU client."""

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> "PJRT":
        """From these variables, or from those of this process."""
        environ = os.environ if environ is None else environ
        return cls(environ.get("PJRT_DEVICE"), Variables(environ, "PJRT's user", ()).integer("CPU_NUM_DEVICES", 1))


@final
class XLAEnvironment(Environment):
    """A process that `torch_xla.launch` started: one for each chip of a TPU. Threads of one process are no ranks."""

    name = "xla"
    names = "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT", "CLOUD_TPU_TASK_ID", "TPU_PROCESS_ADDRESSES"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return {"PJRT_LOCAL_PROCESS_RANK", "CLOUD_TPU_TASK_ID", "TPU_PROCESS_ADDRESSES"} <= set(environ)

    def world(self, environ: Mapping[str, str]) -> World:
        read = Variables(environ, "`torch_xla.launch`", self.names)
        addresses = read.text("TPU_PROCESS_ADDRESSES").split(",")
        rank, local_size = read.integer("CLOUD_TPU_TASK_ID"), read.integer("PJRT_LOCAL_PROCESS_COUNT")
        address, port = addresses[0].rpartition(":")[0], read.integer("MASTER_PORT", PORT)
        at = Rendezvous(address=address, port=port)
        local_rank, size = read.integer("PJRT_LOCAL_PROCESS_RANK"), len(addresses)
        return read.world(self.name, at, rank, size, local_rank, local_size, rank // local_size, size // local_size)
