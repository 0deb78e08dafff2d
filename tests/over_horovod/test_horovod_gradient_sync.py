"""The gradient synchronisation over Horovod keeps the contract that every other one keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_gradient_sync as contract

from fabric.strategies import HorovodStrategy

pytestmark = pytest.mark.slow
contract.TECHNIQUES["horovod"] = (2, HorovodStrategy, "HorovodGradientSync")


@pytest.mark.parametrize(
    "holds",
    [
        contract.test_every_technique_has_a_gradient_sync_of_its_own,
        contract.test_forward_returns_the_output_of_the_model,
        contract.test_unsynchronised_gradients_are_averaged_by_the_next_synchronised_backward_however_contexts_were_nested_and_left,
        contract.test_after_release_nothing_of_ours_is_on_the_module_or_the_optimizer,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_horovod_keeps_the_contract(holds: Callable[[str], None]) -> None:
    holds("horovod")
