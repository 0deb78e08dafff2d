"""Models of transformers with random weights, trained under every strategy as in one process of plain PyTorch.

One launch for each strategy trains all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers_training as training
from transformers_training import BLOCKS, MODELS, QUANTISED, Trained
from worlds import preload

from fabric import Fabric
from fabric.strategies import (
    DDPStrategy,
    FairScaleFSDPStrategy,
    FSDPStrategy,
    ManualStrategy,
    ModelParallelStrategy,
    Strategy,
)
from fabric.strategies.strategy_registry import make_strategy
from fabric.strategies.tensors.wrapper_subclass import plain_state
from fabric.testing import verify

ALL = ("gpt2", "llama", "llama_lora", *QUANTISED, "vit", "t5", "mixtral", "switch")
"""`switch_apart` runs where ranks may use different parameters, and under ddp, which raises. Under others, messages
of different sizes meet before anything is compared, and gloo aborts the process."""
FLATTENS = ("ddp_fully_sharded", "ddp_fully_sharded_blocks", "deepspeed_stage_3", "deepspeed_stage_3_offload")
"""Rows that refuse quantised weights in `setup`."""
NEEDS = {"switch": "unused", "switch_apart": "unused"}
"""What a model asks of a strategy that some strategies lack."""
TOLERANCE = 1e-5
"""The largest difference that was seen is 5e-7."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One launch."""

    strategy: Strategy
    devices: int = 2
    models: tuple[str, ...] = ALL


HSDP = FSDPStrategy(auto_wrap_policy=BLOCKS, device_mesh=(2, 2))
ROWS = {
    "single_device": Row(strategy=make_strategy("single_device"), devices=1),
    "dp": Row(strategy=make_strategy("dp"), devices=1),
    "ddp": Row(strategy=make_strategy("ddp"), models=(*ALL, "switch_apart")),
    "ddp_find_unused_parameters_true": Row(
        strategy=make_strategy("ddp_find_unused_parameters_true"), models=(*ALL, "switch_apart")
    ),
    "ddp_shard_optimizer": Row(strategy=DDPStrategy(shard_optimizer=True)),
    "fsdp": Row(strategy=make_strategy("fsdp")),
    "fsdp_blocks": Row(strategy=FSDPStrategy(auto_wrap_policy=BLOCKS)),
    "hsdp_blocks": Row(strategy=HSDP, devices=4, models=("gpt2", "llama_lora", *QUANTISED, "switch")),
    "hsdp_blocks, the rest": Row(strategy=HSDP, devices=4),
    "model_parallel": Row(strategy=ModelParallelStrategy(parallelize_fn=training.in_shards, shard=2)),
    "manual": Row(strategy=ManualStrategy(parallelize=training.averaged), models=(*ALL, "switch_apart")),
    "ddp_sharded": Row(strategy=make_strategy("ddp_sharded")),
    "ddp_fully_sharded": Row(strategy=make_strategy("ddp_fully_sharded")),
    "ddp_fully_sharded_blocks": Row(strategy=FairScaleFSDPStrategy(wrap=BLOCKS)),
    **{
        f"deepspeed_stage_{stage}{offload}": Row(strategy=make_strategy(f"deepspeed_stage_{stage}{offload}"))
        for stage in (1, 2, 3)
        for offload in ("", "_offload")
    },
}
LEFT = ("deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "hsdp_blocks, the rest")
"""Left to `make check`: stage 3 moves more, and without its offload each is a row as well. Models whose parameters are
all trained are in the row of `fsdp_blocks`; of them, over four ranks, `gpt2` alone runs in `make test-clients`."""
EACH = [pytest.param(name, marks=pytest.mark.thorough if name in LEFT else ()) for name in ROWS]
VERIFIED = [
    pytest.param(name, model, marks=() if number % 3 == turn else pytest.mark.thorough)
    for number, name in enumerate(name for name in ROWS if ROWS[name].devices > 1 and "the rest" not in name)
    for turn, model in enumerate(("gpt2", "llama_lora", "t5"))
]
"""Every strategy with a model in turn; with each of the three in `make check`."""
Ended = dict[str, Trained | str]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # A block of t5 returns a view, which torch advises against.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    # peft merges adapters of torchao's weights only where transformers has quantised the model.
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated"),
    # peft 0.21 asks models for a name that transformers 5.24 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def make_fabric(name: str) -> Fabric:
    """Several ranks are not forks of this process, which computes."""
    row = ROWS[name]
    launcher = "forkserver" if row.devices > 1 else "auto"
    return Fabric(accelerator="cpu", strategy=row.strategy, devices=row.devices, launcher=launcher)


@pytest.fixture(autouse=True, scope="module")
def ranks_import_nothing() -> None:
    """Each rank would import transformers, for 8 s."""
    preload("transformers_training")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plainly() -> Callable[[str], Trained]:
    """Train a model in this process, once."""
    known: dict[str, Trained] = {}

    def train(name: str) -> Trained:
        if name not in known:
            known[name] = training.train_plainly(name)
        return known[name]

    return train


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """Train all models of a row under its strategy, once."""
    known: dict[str, Ended] = {}

    def launch(name: str) -> Ended:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name] = make_fabric(name).launch(training.train_each, ROWS[name].models, str(folder))
        return known[name]

    return launch


@pytest.mark.parametrize("name", EACH)
def test_each_model_is_trained_as_in_one_process_or_the_strategy_raises_what_it_lacks(
    name: str, launched: Callable[[str], Ended], plainly: Callable[[str], Trained]
) -> None:
    row, ended = ROWS[name], launched(name)
    assert list(ended) == list(row.models)
    for model, found in ended.items():
        sentence = row.strategy.lacks.get(NEEDS.get(model, ""))
        if model in QUANTISED and name in FLATTENS:
            sentence = "flattens every parameter"
        if sentence is not None:
            assert isinstance(found, str), f"{model}: {sentence!r} is declared, and nothing was raised"
            assert sentence in found, f"{model}: {found}"
            continue
        assert isinstance(found, Trained), f"{model}: {found}"
        expected = plainly(model)
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=TOLERANCE), model
        torch.testing.assert_close(
            found.weights,
            expected.weights,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda words, model=model: f"{model}: {words}",
        )


@pytest.mark.parametrize(("name", "model"), VERIFIED)
def test_each_strategy_is_verified_on_models_of_transformers(name: str, model: str, tmp_path: Path) -> None:
    row = ROWS[name]
    words = {"strategy": row.strategy, "devices": row.devices, "launcher": "forkserver"}
    verdict = verify(training.train, model, str(tmp_path), steps=training.STEPS, **words)
    assert verdict.is_equal, verdict.sentence


@pytest.mark.parametrize("name", EACH)
def test_only_adapters_of_peft_are_trained(name: str, launched: Callable[[str], Ended]) -> None:
    for model in ("llama_lora", *(QUANTISED if name not in FLATTENS else ())):
        found, before = launched(name)[model], plain_state(training.make_model(model))
        assert isinstance(found, Trained), found
        moved = [key for key, weight in found.weights.items() if not torch.equal(weight, before[key])]
        adapters = [key for key in before if "lora_" in key]
        assert moved == adapters == found.trained
        assert len(adapters) == 8


@pytest.mark.parametrize("name", ["fsdp", "fsdp_blocks"])
def test_generate_gives_the_tokens_of_plain_pytorch_whether_it_is_marked_or_not(name: str) -> None:
    before, after = make_fabric(name).launch(training.generate)
    expected = training.continue_prompts(training.make_model("llama").eval())
    assert torch.equal(before, expected)
    assert torch.equal(after, expected)


def test_a_compiled_model_is_trained_under_ddp_as_in_one_process(
    tmp_path: Path, plainly: Callable[[str], Trained]
) -> None:
    found = make_fabric("ddp").launch(training.train, "llama", str(tmp_path), backend="aot_eager")
    expected = plainly("llama")
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=TOLERANCE)
    torch.testing.assert_close(found.weights, expected.weights, rtol=TOLERANCE, atol=TOLERANCE)


def test_every_model_is_trained_under_some_strategy() -> None:
    assert {model for row in ROWS.values() for model in row.models} == set(MODELS)
