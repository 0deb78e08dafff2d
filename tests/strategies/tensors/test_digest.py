"""Digests of tensors are those of their bits, whatever the dtype and the layout in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fabric.strategies.tensors.digest import digest_of, digest_of_all


def digest(tensor: Tensor) -> int:
    found = digest_of(tensor)
    assert found is not None
    return int(found)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]
)
def test_the_digest_depends_on_each_element_and_its_position(dtype: torch.dtype) -> None:
    values = torch.arange(21).remainder(2).to(dtype)
    assert digest(values) == digest(values.clone())
    for index in range(20):
        changed = values.clone()
        changed[index] = values[index + 1]
        assert digest(changed) != digest(values)
        changed[index + 1] = values[index]  # the two are exchanged
        assert digest(changed) != digest(values)


def test_the_digest_depends_on_the_signs_of_two_elements() -> None:
    values = torch.tensor([0.5, 0.5, 0.5, 0.5])
    changed = values * torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert digest(changed) != digest(values)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_the_digest_of_a_large_tensor_depends_on_each_element() -> None:
    values = torch.zeros(2**21 + 3)
    seen = {digest(values)}
    for index in (0, 2**20, 2**21 - 1, 2**21, 2**21 + 2):
        values[index] = 1.0
        seen.add(digest(values))
    assert len(seen) == 6


def test_a_view_has_the_digest_of_its_copy_and_shape_and_dtype_count() -> None:
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert digest(values.t()) == digest(values.t().contiguous())
    assert digest(values[:, 1:]) == digest(values[:, 1:].clone())
    assert digest(values.view(-1)[1:]) == digest(values.view(-1)[1:].clone())
    assert len({digest(values), digest(values.view(4, 3)), digest(values.view(torch.int32))}) == 3


def test_values_without_bits_have_no_digest_and_empty_tensors_have_one() -> None:
    assert digest_of(torch.empty(2, device="meta")) is None
    assert digest(torch.empty(0)) == digest(torch.empty(0))
    assert digest_of_all([torch.empty(2, device="meta")]) == digest_of_all([torch.zeros(2, device="meta")])
    assert digest_of_all([torch.ones(2), torch.zeros(2)]) != digest_of_all([torch.zeros(2), torch.ones(2)])
