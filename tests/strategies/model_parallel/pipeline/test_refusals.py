"""What a pipeline cannot do right raises, with what to write instead: options, cuts, batches and models."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pipelining import Net, cut_evenly, fabric_with, pipeline
from torch import Tensor, nn

from fabric import Fabric, WorkerError
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.model_parallel.pipeline.options import Pipeline
from fabric.strategies.model_parallel.pipeline.split import drop_other_stages, split_model


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "1f1b"}, r"`schedule='1f1b'` is not a schedule\. Write one of 'GPipe', '1F1B', "),
        ({"stages_per_rank": "2"}, "`stages_per_rank='2'`: write a whole number from 1 on"),
        ({"degree": 1, "schedule": "LoopedBFS"}, "`schedule='LoopedBFS'` needs two ranks or more. Write '1F1B'"),
        ({"degree": 0}, "`degree=0`: write a whole number from 1 on"),
        ({"num_microbatches": 0}, "`num_microbatches=0`: write a whole number from 1 on"),
        ({"stages_per_rank": 2}, r"`stages_per_rank=2` with `schedule='1F1B'`, which needs 1 on each rank"),
        ({"stages_per_rank": 1, "schedule": "LoopedBFS"}, "which needs 2 or more on each rank"),
        ({"loss_reduction": "max"}, "`loss_reduction='max'`: write 'mean' or 'sum'"),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_options_that_contradict_each_other_raise_in_the_constructor(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pipeline(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": ["1"]}, r"`split=\['1'\]` is no function. Pass one, `split\(model, stage, num_stages\)`"),
        ({"loss_fn": nn.Linear(2, 2)}, "`loss_fn` is a `Linear` with parameters, which would not be trained"),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_options_of_a_wrong_type_raise_in_the_constructor(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        pipeline(**options)


def test_several_stages_per_rank_are_placed_as_the_schedule_needs_them() -> None:
    loop = pipeline("Interleaved1F1B", 2, 4, stages_per_rank=3)
    assert [loop.stages_of(rank) for rank in (0, 1)] == [(0, 2, 4), (1, 3, 5)]
    assert loop.num_stages == 6


def in_two(split: Callable[..., nn.Module]) -> Pipeline:
    return pipeline(split=split)


def sequence() -> nn.Sequential:
    inner = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=nn.Linear(2, 2)))
    return nn.Sequential(OrderedDict(start=nn.Linear(2, 2), blocks=inner, end=nn.Linear(2, 2)))


def within_blocks(model: nn.Sequential, stage: int, num_stages: int) -> nn.Module:
    assert isinstance(model.blocks, nn.Sequential)
    model.blocks = model.blocks[:1] if stage == 0 else model.blocks[1:]
    return model[:2] if stage == 0 else model[1:]


def halved(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
    """Stage 0 has the first submodule."""
    for place, (name, _) in enumerate(list(model.named_children())):
        if (place > 0) != (stage > 0):
            delattr(model, name)
    return model


def test_a_sequential_that_is_split_by_slices_keeps_its_names() -> None:
    model = sequence()
    first, second = split_model(model, in_two(within_blocks))
    assert [name for name, _ in first.module.named_modules()] == ["", "start", "blocks", "blocks.first"]
    assert [name for name, _ in second.module.named_modules()] == ["", "blocks", "blocks.second", "end"]
    assert first.module.get_submodule("blocks.first") is model.blocks.first
    x = torch.randn(3, 2)
    assert torch.equal(second.module(first.module(x)), model(x))
    drop_other_stages(model, [second])
    assert list(model.state_dict()) == ["blocks.second.weight", "blocks.second.bias", "end.weight", "end.bias"]
    whole, _ = split_model(sequence(), in_two(halved))
    assert [name for name, _ in whole.module.named_modules()] == ["", "start"]


def test_a_submodule_within_one_stage_is_the_users_object_and_one_that_is_split_is_a_copy() -> None:
    net = Net()
    before = {name: id(part) for name, part in net.named_modules()}
    first, second = split_model(net, in_two(cut_evenly))
    for stage in (first, second):
        for name, part in stage.module.named_modules():
            assert (id(part) == before[name]) == (name not in ("", "blocks")), name
    net.eval()
    first.copy_mode()
    assert not any(part.training for part in first.module.modules())
    assert {name: id(part) for name, part in net.named_modules()} == before
    assert net.embed is not None


def keep_all(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
    return model


def keep_none(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
    model.embed = None
    return model


def give_a_name(model: nn.Module, stage: int, num_stages: int) -> Any:
    return "embed"


def number_anew(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
    return nn.Sequential(*list(model.children())[stage : stage + 1])


def lose_a_buffer(model: Net, stage: int, num_stages: int) -> nn.Module:
    cut_evenly(model, stage, num_stages)
    model.offset = None
    return model


@pytest.mark.parametrize(
    ("make", "split", "error", "words"),
    [
        (Net, keep_all, ValueError, "One parameter is `place` in stage 0 and `place` in stage 1, where it would be"),
        (Net, lose_a_buffer, ValueError, "`offset` is in none of the 2 stages"),
        (Net, give_a_name, TypeError, r"`split\(model, 0, 2\)` returned 'embed'"),
        (
            sequence,
            number_anew,
            ValueError,
            "Stage 0 has `0.weight`, which the model does not have, or has as another tensor",
        ),
    ],
)
def test_splits_that_lose_duplicate_or_rename_weights_raise(
    make: Callable[[], nn.Module], split: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        split_model(make(), in_two(split))


def test_a_weight_tied_across_two_stages_raises_with_both_names() -> None:
    net = Net()
    assert isinstance(net.embed, nn.Embedding)
    assert isinstance(net.head, nn.Linear)
    net.head.weight = net.embed.weight
    with pytest.raises(ValueError, match=r"One parameter is `embed.weight` in stage 0 and `head.weight` in stage 1"):
        split_model(net, in_two(cut_evenly))
    model = sequence()
    model.blocks.first.weight = model.start.weight
    assert len(split_model(model, in_two(within_blocks))) == 2  # tied within a stage


class Normed(nn.Sequential):
    """Stage 1 has a BatchNorm, or another layer that counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(nn.Linear(4, 4), nn.Sequential(layer, nn.Linear(4, 4)))


class Counts(nn.Module):
    """Keeps a number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def square(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (outputs - target).square().mean()


def each(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss for each sample, which is none."""
    return (outputs - target).square().mean(dim=1)


@dataclass(frozen=True)
class Raises:
    """What is written, and what is answered, on which ranks."""

    error: type[BaseException]
    words: str
    call: Callable[[Fabric, nn.Module, Tensor, Tensor], object]
    ranks: tuple[int, ...] = (0, 1)


def evaluate(fabric: Fabric, model: nn.Module, x: Tensor, y: Tensor) -> object:
    return model(x)


CALLS = [
    Raises(RuntimeError, r"called without a target while gradients are enabled.*Write `loss = model\(", evaluate),
    Raises(
        RuntimeError,
        r"given a tensor that requires gradients, which it would not get",
        lambda fabric, model, x, y: model(x.clone().requires_grad_(), y),
    ),
    Raises(
        ValueError,
        r"A batch of 6 samples cannot be split into `num_microbatches=4` equal parts",
        lambda fabric, model, x, y: model(x[:6], y[:6]),
    ),
    Raises(
        ValueError,
        r"along its first dim, but they have the shapes \(8, 4\), \(4, 4\)",
        lambda fabric, model, x, y: model(x, y[:4]),
    ),
    Raises(
        CollectiveError,
        "The 2 ranks did not make the same call.*tensor 0 of the batch",
        lambda fabric, model, x, y: model(x[: 4 * (1 + fabric.global_rank)], y[: 4 * (1 + fabric.global_rank)]),
    ),
    Raises(
        CollectiveError,
        "tensor 0 of the batch.*content",
        lambda fabric, model, x, y: model(x + fabric.global_rank, y),
    ),
    Raises(
        ValueError,
        r"`mark_forward_method\('loss'\)` on a model in a pipeline",
        lambda fabric, model, x, y: model.mark_forward_method(_loss_method),
    ),
]


def _loss_method() -> None: ...


_loss_method.__name__ = "loss"


def call_wrongly(fabric: Fabric) -> None:
    """One call after another; none leaves anything behind, and the model trains on."""
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))
    net = Normed(nn.Identity())
    plain = copy.deepcopy(net)
    net.loss = _loss_method
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    plain.load_state_dict(fabric.broadcast(plain.state_dict()))
    for each in CALLS:
        with pytest.raises(each.error, match=f"(?s){each.words}"):
            each.call(fabric, model, x, y)
    for _ in range(2):  # the second with nothing new
        torch.testing.assert_close(model(x, y), square(plain(x), y))
    refuse_optimizers(fabric)


def refuse_optimizers(fabric: Fabric) -> None:
    net = Normed(nn.Identity())
    with pytest.raises(ValueError, match="`LBFGS` computes each step from the gradients of all parameters"):
        fabric.setup(net, torch.optim.LBFGS(net.parameters()))
    model = fabric.setup(Normed(nn.Identity()))
    late = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="This `SGD` was made after `setup`, from the parameters of one rank's stages"):
        fabric.save("nowhere", {"optimizer": late})


@pytest.mark.slow
def test_wrong_calls_raise_on_every_rank_and_leave_the_model_unchanged() -> None:
    fabric_with(2, pipeline(split=halved, loss_fn=square), "32-true").launch(call_wrongly)


def train_once(fabric: Fabric, make: Callable[[], nn.Module]) -> None:
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))
    net = make()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(x, y))


def with_norm() -> nn.Module:
    return Normed(nn.BatchNorm1d(4))


def with_frozen_norm() -> nn.Module:
    net = Normed(nn.BatchNorm1d(4))
    net[1].eval()
    return net


def with_counts() -> nn.Module:
    return Normed(Counts())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "make", "words"),
    [
        (
            pipeline(split=halved, loss_fn=square),
            with_norm,
            r"The buffer `1.0.(running_mean|num_batches_tracked)` changed in forward\.",
        ),
        (pipeline(split=halved, loss_fn=square), with_counts, r"The buffer `1.0.calls` changed in forward\."),
        (pipeline(split=halved, loss_fn=each), with_frozen_norm, "grad can be implicitly created only for scalar outp"),
    ],
    ids=["norm", "counts", "loss"],
)
def test_models_whose_numbers_a_pipeline_would_change_end_the_job(
    options: Pipeline, make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(WorkerError, match=f"(?s){words}"):
        fabric_with(2, options, "32-true").launch(train_once, make)


@pytest.mark.slow
def test_a_frozen_norm_trains() -> None:
    fabric_with(2, pipeline(split=halved, loss_fn=square), "32-true").launch(train_once, with_frozen_norm)
