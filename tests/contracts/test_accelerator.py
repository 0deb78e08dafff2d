"""What every accelerator by name holds, whether or not this machine has its devices."""

from __future__ import annotations

import pickle

import pytest
import torch

from fabric.strategies.accelerators import (
    Accelerator,
    CPUAccelerator,
    TorchAccelerator,
    accelerators,
    available_accelerators,
    make_accelerator,
    register_accelerator,
)

EVERY = pytest.mark.parametrize("accelerator", accelerators(), ids=lambda accelerator: accelerator.name)
USABLE = pytest.mark.parametrize(
    "accelerator",
    [accelerator for accelerator in accelerators() if accelerator.why_unavailable() is None],
    ids=lambda accelerator: accelerator.name,
)


@EVERY
def test_it_is_created_by_its_name(accelerator: Accelerator) -> None:
    assert make_accelerator(accelerator.name) == accelerator


@EVERY
def test_it_can_be_pickled_and_compares_equal(accelerator: Accelerator) -> None:
    assert pickle.loads(pickle.dumps(accelerator)) == accelerator
    assert hash(accelerator) == hash(make_accelerator(accelerator.name))


@EVERY
def test_it_gives_a_reason_exactly_where_it_has_no_device(accelerator: Accelerator) -> None:
    assert (accelerator.num_devices() == 0) == (accelerator.why_unavailable() is not None)


@EVERY
def test_it_is_listed_as_available_exactly_where_nothing_is_missing(accelerator: Accelerator) -> None:
    assert (accelerator.name in available_accelerators()) == (accelerator.why_unavailable() is None)


@EVERY
def test_the_reason_has_the_name_and_the_version_of_torch(accelerator: Accelerator) -> None:
    sentence = accelerator.why_unavailable()
    if sentence is not None and isinstance(accelerator, TorchAccelerator):
        assert f"torch {torch.__version__} is built for " in sentence
        assert accelerator.name in sentence
        assert sentence.endswith(".")


@USABLE
def test_a_tensor_can_be_made_on_its_first_device(accelerator: Accelerator) -> None:
    accelerator.set_device(0)
    device = accelerator.device(0)
    assert device.type == accelerator.name
    assert torch.ones(2, device=device).sum().item() == 2


@USABLE
def test_its_backend_is_one_of_torch_distributed(accelerator: Accelerator) -> None:
    assert accelerator.backend in torch.distributed.Backend.backend_list


def test_the_cpu_is_one_device_whatever_the_index() -> None:
    cpu = CPUAccelerator()
    assert cpu.is_shared
    assert cpu.device(0) == cpu.device(7) == torch.device("cpu")


def test_devices_are_distinguished_by_index() -> None:
    assert not TorchAccelerator("cuda").is_shared
    assert TorchAccelerator("cuda").device(1) == torch.device("cuda", 1)


def test_backends_are_those_torch_registers() -> None:
    assert TorchAccelerator("cuda").backend == "nccl"


def test_an_unknown_name_is_an_error_with_near_and_all_names() -> None:
    with pytest.raises(ValueError, match=r"`accelerator='cud'` is not known. Did you mean 'cuda'\? Write 'auto' or"):
        make_accelerator("cud")


@pytest.mark.parametrize("name", ["cpu", "cuda", "auto"])
def test_a_name_that_is_taken_cannot_be_registered(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"`register_accelerator\\('{name}', ...\\)`: the name is taken. Choose another"
    ):
        register_accelerator(name, CPUAccelerator)
