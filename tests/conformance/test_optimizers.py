"""The table of `docs/optimizers.md` is what is seen."""

from __future__ import annotations

import pytest
from optimizers import OPTIMIZERS, STRATEGIES, column, differences, in_page, installed


def test_the_page_has_every_optimizer_under_every_strategy() -> None:
    for strategy in STRATEGIES:
        assert in_page(strategy).keys() == OPTIMIZERS.keys(), "run `make optimizers`, with all packages"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp, shard_optimizer", "fsdp", "model_parallel"])
def test_an_optimizer_trains_as_in_one_process_or_is_refused_as_the_page_says(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its step, a minute for each rank
    names = installed()
    page = in_page(strategy)
    assert column(differences(strategy, names)) == {name: page[name] for name in names}
