"""What is known of XLA without torch_xla: the ranks that it started, and why nothing of it runs where it is missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from fabric import Fabric
from fabric.launchers import World, detect_world
from fabric.launchers.environments.xla import PJRT
from fabric.launchers.world import Rendezvous
from fabric.strategies.accelerators import make_accelerator

ONE_OF_EIGHT = {
    "PJRT_LOCAL_PROCESS_RANK": "1",
    "PJRT_LOCAL_PROCESS_COUNT": "4",
    "CLOUD_TPU_TASK_ID": "5",
    "TPU_PROCESS_ADDRESSES": ",".join(
        f"{host}:{port}" for host in ("10.0.0.1", "10.0.0.2") for port in range(8476, 8480)
    ),
}
"""The second process on the second of two hosts, as torch_xla 2.9's `tpu.configure_topology` describes it."""


def test_a_process_that_torch_xla_started_on_a_pod_has_its_rank() -> None:
    assert detect_world(ONE_OF_EIGHT) == World(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node_rank=1,
        num_nodes=2,
        rendezvous=Rendezvous(address="10.0.0.1", port=12355, hosted=False),
        launcher="xla",
    )


def test_variables_of_a_pod_that_contradict_each_other_are_an_error_with_their_values() -> None:
    with pytest.raises(ValueError, match=r"CLOUD_TPU_TASK_ID=9 .*contradict each other.*`torch_xla\.launch`"):
        detect_world({**ONE_OF_EIGHT, "CLOUD_TPU_TASK_ID": "9"})


def test_threads_of_one_process_are_not_ranks() -> None:
    assert detect_world({"PJRT_LOCAL_PROCESS_RANK": "0", "PJRT_LOCAL_PROCESS_COUNT": "1", "PJRT_DEVICE": "CPU"}) is None


def test_the_client_is_that_of_the_environment() -> None:
    assert PJRT.of({}) == PJRT(client=None, num_cpu_devices=1)
    assert PJRT.of({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}) == PJRT(client="CPU", num_cpu_devices=4)


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed")
@pytest.mark.parametrize("strategy", ["xla", "xla_fsdp", "single_xla"])
def test_without_torch_xla_each_strategy_raises_with_the_command_that_installs_it(strategy: str) -> None:
    words = rf"`strategy='{strategy}'` needs torch-xla.* Run `pip install 'torchfabric\[xla\]'`"
    with pytest.raises(ValueError, match=words):
        Fabric(accelerator="cpu", strategy=strategy, devices=1)


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_without_torch_xla_the_accelerator_raises_with_the_command_that_installs_it() -> None:
    accelerator = make_accelerator("xla")
    assert accelerator.num_devices() == 0
    with pytest.raises(
        ValueError, match=r"`accelerator='xla'` cannot be used here\. torch-xla is not installed\. `pip"
    ):
        Fabric(accelerator="xla", devices=1)
