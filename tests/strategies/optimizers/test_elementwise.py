"""Optimizers of which ranks step parts: those of the table, and those that say what they compute an update from."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from fabric.strategies.optimizers.elementwise import KNOWN, refuse_dependent, takes_plain_tensors, updates_each


class Own(SGD):
    """A rule that the table does not know."""


def made(kind: type[Optimizer]) -> Optimizer:
    return kind([nn.Parameter(torch.ones(3, 2))], lr=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("optimizer", "unit"), [(made(AdamW), "element"), (made(Adafactor), "parameter"), (made(Own), None)]
)
def test_the_table_knows_optimizers_by_class_and_package(optimizer: Optimizer, unit: str | None) -> None:
    assert updates_each(optimizer) == unit


@pytest.mark.parametrize(
    ("name", "options", "unit"),
    [
        ("lion_pytorch.Lion", {}, "element"),
        ("lion_pytorch.cautious_lion.Lion", {}, "parameter"),
        ("lion_pytorch.cautious_lion.Lion", {"cautious_factor": 1.0}, "element"),
        ("pytorch_optimizer.Lion", {"use_gc": False}, "element"),
        ("pytorch_optimizer.Lion", {"use_gc": True}, "parameter"),
        ("pytorch_optimizer.AdaBelief", {"adanorm": True}, "parameter"),
        ("pytorch_optimizer.ADOPT", {"stable_adamw": True}, "parameter"),
        ("pytorch_optimizer.Lamb", {}, "parameter"),
        ("pytorch_optimizer.Lamb", {"pre_norm": True}, "model"),
        ("bitsandbytes.optim.AdamW", {}, "element"),
        ("bitsandbytes.optim.AdamW", {"optim_bits": 8}, "parameter"),
        ("bitsandbytes.optim.LAMB32bit", {}, "parameter"),
    ],
)
def test_what_an_update_is_computed_from_may_depend_on_an_option(name: str, options: dict[str, Any], unit: str) -> None:
    package, _, kind = name.rpartition(".")
    optimizer: Optimizer = getattr(import_module(package), kind)([nn.Parameter(torch.ones(3, 2))], lr=0.1, **options)
    assert updates_each(optimizer) == unit
    assert takes_plain_tensors(optimizer) == (package.startswith("bitsandbytes") or kind == "ADOPT")


def test_options_of_single_parameters_of_bitsandbytes_are_refused_where_ranks_have_parts() -> None:
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    layer, manager = nn.Linear(3, 2), GlobalOptimManager.get_instance()
    optimizer = AdamW8bit(layer.parameters())
    manager.override_config(layer.weight, "optim_bits", 32)
    try:
        with pytest.raises(
            ValueError, match=r"`AdamW8bit` finds options of single parameters .* Pass `strategy='ddp'`"
        ):
            refuse_dependent([optimizer], "no `{optimizer}`", flat=False)
    finally:
        manager.initialize()  # there is one in a process


def test_the_table_names_every_optimizer_of_torch() -> None:
    kinds = {name for name, one in vars(torch.optim).items() if isinstance(one, type) and issubclass(one, Optimizer)}
    assert kinds - {"Optimizer"} == {name for classes in KNOWN.values() for name in classes["torch"].split()}


def test_an_optimizer_of_whole_parameters_is_refused_where_they_are_cut_into_slices() -> None:
    refuse_dependent([made(Adafactor)], "no `{optimizer}`", flat=False)
    with pytest.raises(ValueError, match="no `Adafactor`"):
        refuse_dependent([made(Adafactor)], "no `{optimizer}`", flat=True)


def test_an_unknown_optimizer_is_refused_until_it_says_what_it_needs() -> None:
    optimizer = made(Own)
    for flat, unit in ((True, "element"), (False, "parameter")):
        with pytest.raises(
            ValueError,
            match=rf"`Own` is not known to .* each {unit} .* write `optimizer.updates_each = '{unit}'` before",
        ):
            refuse_dependent([optimizer], "no `{optimizer}`", flat=flat)
        optimizer.updates_each = unit  # type: ignore[attr-defined]
        refuse_dependent([optimizer], "no `{optimizer}`", flat=flat)
        del optimizer.updates_each  # type: ignore[attr-defined]
