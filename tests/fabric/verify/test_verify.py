"""`fabric verify`: right programs are equal to one process, wrong ones part where they are wrong, and dead ones pass
nothing."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import template
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fabric import CheckpointDirectory, Fabric
from fabric.checks.verify_record import Record, Recorder, Recording
from fabric.cli.verify import as_json, show
from fabric.configure.request import Request
from fabric.configure.run_options import ProgramId, as_variable
from fabric.strategies import DDPStrategy, ModelParallelStrategy, Pipeline
from fabric.testing import verify
from fabric.verify.runs import ProgramError, _refuse_other_model, judge

pytestmark = pytest.mark.timeout(600)  # three runs in each test, on a machine that others use
mse = nn.functional.mse_loss


def samples(number: int = 96) -> TensorDataset:
    inputs = torch.randn(number, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def set_up(fabric: Fabric, model: nn.Module, make: Callable[..., Optimizer] = AdamW, lr: float = 1e-2) -> Any:
    return fabric.setup(model, make(model.parameters(), lr=lr))


def trained(
    fabric: Fabric,
    make: Callable[[], nn.Module] = mlp,
    dataset: Any = None,
    batch_size: int = 8,
    scale: float = 1.0,
    lr: float = 1e-2,
    after_step: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, make(), lr=lr)
    shuffles = not isinstance(dataset, IterableDataset)
    loader = fabric.setup_dataloaders(DataLoader(dataset or samples(), batch_size, shuffle=shuffles))
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(mse(model(inputs), targets) * scale)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            after_step(model)


def a_plain_loop(fabric: Fabric) -> None:
    trained(fabric)


def sums_with_weights_in_windows(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, mlp())
    for window in fabric.accumulate(fabric.setup_dataloaders(DataLoader(samples(43), 5)), 2):
        for inputs, targets in window:
            fabric.backward(mse(model(inputs), targets, reduction="sum"), weight=len(inputs))
        optimizer.step()
        optimizer.zero_grad()


def two_models_and_two_optimizers(fabric: Fabric) -> None:
    torch.manual_seed(0)
    generator, by_generator = set_up(fabric, nn.Linear(4, 8), Adam)
    judge, by_judge = set_up(fabric, nn.Linear(8, 1), Adam)
    for inputs, _ in fabric.setup_dataloaders(DataLoader(samples(), 8)):
        by_judge.zero_grad()
        fabric.backward(judge(generator(inputs[:, :4]).detach()).mean() - judge(inputs).mean(), model=judge)
        by_judge.step()
        by_generator.zero_grad()
        fabric.backward(-judge(generator(inputs[:, :4])).mean(), model=[generator, judge])
        by_generator.step()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([samples()[index % 96] for index in range(200)])


def a_stream(fabric: Fabric) -> None:
    trained(fabric, dataset=Stream())


def ready_batches(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, mlp(), SGD)
    for batch in fabric.setup_dataloaders(list(torch.randn(96, 8).split(4))):
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def an_evaluation_between_steps_and_a_schedule(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, mlp())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    loader = fabric.setup_dataloaders(DataLoader(samples(), 8, shuffle=True, generator=torch.Generator()))
    test = fabric.setup_dataloaders(DataLoader(samples(20), 8), use="validate")
    for number, (inputs, targets) in enumerate(loader):
        fabric.backward(mse(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if number % 2:
            with torch.no_grad():
                [model(inputs) for inputs, _ in test]


def steps(
    fabric: Fabric, model: nn.Module, dataset: Any, loss_of: Callable[[nn.Module, Any], Tensor], **of: Any
) -> Any:
    """Train `model`, made before; yields after each step."""
    model, optimizer = set_up(fabric, model)
    loader = fabric.setup_dataloaders(DataLoader(dataset, of.pop("batch_size", 4), shuffle=True, **of))
    for batch in loader:
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        yield model


def squares(model: nn.Module, batch: Any) -> Tensor:
    return mse(model(batch[0]), batch[1])


def a_batch_size_over_the_world_size(fabric: Fabric) -> None:
    torch.manual_seed(0)
    list(steps(fabric, mlp(), samples(), squares, batch_size=16 // fabric.world_size))


def an_average_of_weights(fabric: Fabric) -> None:
    torch.manual_seed(0)
    average = None
    for model in steps(fabric, mlp(), samples(), squares):
        average = average or fabric.ema(model, 0.9)
        average.update()
        with average.applied(), torch.no_grad():
            model(torch.ones(2, 8))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.read = nn.Embedding(12, 8), nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.read(self.embedding(tokens))[0]))  # type: ignore[no-any-return]


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def layers_with_dropout_and_a_tied_weight(fabric: Fabric) -> None:
    torch.manual_seed(0)
    list(steps(fabric, Words(), torch.randint(0, 12, (64, 9)), next_token))


def a_compiled_model(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model = torch.compile(mlp(), backend="aot_eager")
    list(steps(fabric, model, samples(), squares, num_workers=1))  # type: ignore[arg-type]


def a_model_that_is_compiled_as_one_graph_after_setup(fabric: Fabric) -> None:
    torch.manual_seed(0)
    prepared, optimizer = set_up(fabric, mlp())
    model = torch.compile(prepared, backend="eager", fullgraph=True)
    for batch in fabric.setup_dataloaders(DataLoader(samples(), 4)):
        fabric.backward(squares(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def a_frozen_layer_and_optimizers_set_up_on_their_own(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    module = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(SGD([each for each in module.parameters() if each.requires_grad], 0.1))
    for batch in fabric.setup_dataloaders(DataLoader(samples(), 4)):
        with fabric.no_backward_sync(module):
            fabric.backward(squares(module, batch))
        fabric.backward(squares(module, batch))
        optimizer.step()
        optimizer.zero_grad()


def a_gather_with_gradients(fabric: Fabric) -> None:
    def alike(model: nn.Module, batch: Any) -> Tensor:
        out = fabric.all_gather(model(batch[0]), sync_grads=True).flatten(0, -2)
        return (out @ out.T).square().mean()

    torch.manual_seed(0)
    list(steps(fabric, mlp(), samples(), alike))


RIGHT = (
    a_plain_loop,
    a_batch_size_over_the_world_size,
    an_average_of_weights,
    layers_with_dropout_and_a_tied_weight,
    a_compiled_model,
    a_gather_with_gradients,
    sums_with_weights_in_windows,
    two_models_and_two_optimizers,
    a_stream,
    ready_batches,
    an_evaluation_between_steps_and_a_schedule,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_2", "deepspeed_stage_3"]
)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_a_right_program_is_equal_to_one_process(program: Callable[..., None], strategy: str) -> None:
    if (program, strategy) == (a_compiled_model, "deepspeed_stage_3"):  # which refuses it
        with pytest.raises(ProgramError, match="Compile what `setup` returns"):
            verify(program, strategy=strategy, steps=4)
        return
    verdict = verify(program, strategy=strategy, steps=4)
    assert verdict.is_equal, verdict.sentence
    assert verdict.sentence.startswith(f"The numbers of one process: {strategy} on 2 ranks is equal in")


def test_a_weight_whose_gradient_is_rounding_alone_is_not_compared(tmp_path: Path) -> None:
    known, name = kept(tmp_path, a_plain_loop), "0.bias"

    def scaled(gradient: float, weight: float) -> Record:
        """The record with other numbers of one parameter, as of the bias of an attention's keys under Adam."""
        steps = []
        for step in known.steps:
            gradients = {**step.gradients, name: tuple(gradient * each for each in step.gradients[name])}
            weights = {**step.weights, name: tuple(weight * each for each in step.weights[name])}
            steps.append(replace(step, gradients=gradients, weights=weights))
        return replace(known, steps=steps)

    assert judge(scaled(1e-9, 1.0), None, scaled(1e-9, 1.1), 1e-5).is_equal
    for gradient in (0.0, 1.0):
        verdict = judge(scaled(gradient, 1.0), None, scaled(gradient, 1.1), 1e-5)
        assert "the weight of `0.bias` under single_device on 1 rank" in verdict.sentence


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_is_compiled_as_one_graph_is_compared_in_the_order_of_its_names(strategy: str) -> None:
    verdict = verify(a_model_that_is_compiled_as_one_graph_after_setup, strategy=strategy, steps=3)
    assert verdict.is_equal, verdict.sentence
    assert verdict.run.order == ["0.weight", "0.bias", "3.weight", "3.bias"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_frozen_layer_and_an_optimizer_that_is_set_up_on_its_own_are_equal_to_one_process(strategy: str) -> None:
    verdict = verify(a_frozen_layer_and_optimizers_set_up_on_their_own, strategy=strategy, steps=4)
    assert verdict.is_equal, verdict.sentence


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "64-true"])
def test_in_each_precision_a_right_program_is_equal_and_a_wrong_factor_is_found(precision: str) -> None:
    verdict = verify(a_plain_loop, steps=3, precision=precision)
    assert verdict.is_equal, verdict.sentence
    verdict = verify(a_loss_over_the_world_size, steps=1, precision=precision)
    assert "step 1: the gradient of `0.weight`" in verdict.sentence
    assert len(verdict.causes) == 1  # half precision divides no gradient


def skipping(record: Record, *steps: int) -> Record:
    """The record, in which the loss scaler has skipped these steps."""
    skipped = [replace(step, was_skipped=number in steps) for number, step in enumerate(record.steps, 1)]
    return replace(record, steps=skipped, eps=2.0**-10)


def test_steps_that_one_run_skips_in_float16_end_the_comparison_and_are_named(tmp_path: Path) -> None:
    known = kept(tmp_path, a_plain_loop)
    run = replace(skipping(known, 2), strategy="ddp", num_ranks=2)
    verdict = judge(skipping(known), skipping(known), run, None)
    assert verdict.is_equal
    words = " In step 2 gradients overflowed in float16 under ddp alone: nothing is compared from there on."
    assert verdict.sentence.startswith("The numbers of one process: ddp on 2 ranks is equal in 1 step, within")
    assert verdict.sentence.endswith(words)
    verdict = judge(skipping(known), skipping(known), replace(run, steps=skipping(known, 1).steps), None)
    assert not verdict.is_equal
    assert verdict.sentence == "Nothing was compared: in step 1 gradients overflowed in float16 under ddp alone."
    assert verdict.causes[0].startswith("The loss scaler skipped a step in one of the runs")
    assert judge(skipping(known, 1), skipping(known, 1), skipping(known, 1), None).comparison.num_compared == 2  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp_fully_sharded"])
def test_a_right_program_in_float16_skips_no_step_that_one_process_takes(strategy: str) -> None:
    verdict = verify(a_plain_loop, strategy=strategy, steps=6, precision="16-mixed")
    assert verdict.is_equal, verdict.sentence
    assert "equal in 6 steps" in verdict.sentence


def half(model: nn.Sequential, stage: int, num_stages: int) -> nn.Module:
    return model[:2] if stage == 0 else model[2:]


def a_pipeline(fabric: Fabric, factor: int = 0) -> None:
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    for inputs, targets in fabric.setup_dataloaders(DataLoader(samples(), 8)):
        fabric.backward(model(inputs, targets) * fabric.world_size**factor)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert model(inputs).shape == targets.shape


@pytest.mark.slow
def test_a_pipeline_is_equal_to_the_whole_model_in_one_process_and_a_wrong_factor_is_found() -> None:
    pipeline = Pipeline(degree=2, schedule="1F1B", num_microbatches=4, split=half, loss_fn=mse)
    strategy = ModelParallelStrategy(pipeline=pipeline)
    verdict = verify(a_pipeline, strategy=strategy, steps=3)
    assert verdict.is_equal, verdict.sentence
    assert sorted(verdict.run.steps[0].gradients) == sorted(verdict.reference.steps[0].gradients)
    verdict = verify(a_pipeline, 1, strategy=strategy, steps=1)
    assert "in step 1: the gradient of `0.weight` under ModelParallelStrategy on 2 ranks is 2 times" in verdict.sentence


def test_two_models_are_compared_in_the_order_of_forward(tmp_path: Path) -> None:
    recorder = Recorder(Recording(path=str(tmp_path / "record"), num_steps=1), "single_device")
    with pytest.raises(SystemExit):
        two_models_and_two_optimizers(Fabric(accelerator="cpu", devices=1, plugins=[recorder]))
    assert Record.load(tmp_path / "record").order == ["weight", "bias", "1: weight", "1: bias"]


def two_backwards_a_step(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, mlp())
    for inputs, targets in fabric.setup_dataloaders(DataLoader(samples(), 8)):
        for each in (inputs, 2 * inputs):
            fabric.backward(mse(model(each), targets))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_gradients_that_are_read_end_the_window_of_deepspeed_and_the_next_backward_says_what_to_write() -> None:
    words = r"A backward of `Sequential` after its gradients were averaged[\s\S]*within `fabric.accumulate` or"
    with pytest.raises(ProgramError, match=words):
        verify(two_backwards_a_step, strategy="deepspeed_stage_2", steps=4)


def a_mean_over_tokens(fabric: Fabric) -> None:
    draws = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 9, (int(n),), generator=draws) for n in torch.randint(2, 12, (64,), generator=draws)]
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 10)))
    collate = lambda batch: nn.utils.rnn.pad_sequence(batch, batch_first=True)  # noqa: E731
    for tokens in fabric.setup_dataloaders(DataLoader(texts, 4, collate_fn=collate)):
        logits = model(tokens)
        fabric.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0))
        optimizer.step()
        optimizer.zero_grad()


def a_mean_over_a_short_last_batch(fabric: Fabric) -> None:
    trained(fabric, dataset=samples(41))


def batch_norm(fabric: Fabric) -> None:
    trained(fabric, lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))


def a_loss_times_the_world_size(fabric: Fabric) -> None:
    trained(fabric, scale=fabric.world_size)


def a_loss_over_the_world_size(fabric: Fabric) -> None:
    trained(fabric, scale=1 / fabric.world_size)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.first(inputs), 0.5, self.training))  # type: ignore[no-any-return]


def dropout_as_a_function(fabric: Fabric) -> None:
    trained(fabric, Dropped)


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        inputs, target = samples()[index]
        return inputs + torch.randn(8) / 10, target


def random_augmentation(fabric: Fabric) -> None:
    trained(fabric, dataset=Augmented())


def data_of_no_prepared_loader(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, mlp())
    for step in range(9):
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(7 * step + fabric.global_rank))
        fabric.backward(mse(model(inputs), inputs.sum(1, keepdim=True)))
        optimizer.step()
        optimizer.zero_grad()


def a_learning_rate_times_the_world_size(fabric: Fabric) -> None:
    trained(fabric, lr=1e-2 * fabric.world_size)


def a_model_that_each_run_draws_anew(fabric: Fabric) -> None:
    torch.manual_seed(fabric.world_size)
    model, optimizer = set_up(fabric, mlp())
    for inputs, targets in fabric.setup_dataloaders(DataLoader(samples(), 8)):
        fabric.backward(mse(model(inputs), targets))
        optimizer.step()


def weights_changed_between_steps(fabric: Fabric) -> None:
    @torch.no_grad()
    def decay(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.mul_(1 - 0.01 * fabric.world_size)

    trained(fabric, after_step=decay)


def a_gather_without_gradients(fabric: Fabric) -> None:
    def alike(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        everyone = fabric.all_gather(out).flatten(0, 1) if fabric.world_size > 1 else out
        return (out @ everyone.T).square().mean()

    torch.manual_seed(0)
    list(steps(fabric, mlp(), samples(), alike))


def a_sum_over_samples(fabric: Fabric) -> None:
    torch.manual_seed(0)
    list(steps(fabric, mlp(), samples(), lambda model, batch: squares(model, batch) * len(batch[0])))


def resumes(fabric: Fabric, folder: Path, num_steps: int) -> None:
    torch.manual_seed(0)
    model, optimizer = fabric.setup(net := mlp(), torch.optim.SGD(net.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=4))
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = CheckpointDirectory(folder, keep_last=1)
    checkpoints.load(fabric, state)
    for batch in loader:
        if fabric.num_steps < num_steps:
            fabric.backward(squares(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(fabric, state, step=fabric.num_steps, blocking=fabric.num_steps % 2 > 0)
    fabric.save(folder / "last", state)


def resumes_by_itself(fabric: Fabric, folder: Path, num_steps: int) -> None:
    torch.manual_seed(0)
    model, optimizer = fabric.setup(net := mlp(), torch.optim.SGD(net.parameters(), lr=0.1))
    if (folder / "own").exists():
        done, weights = torch.load(folder / "own")
        net.load_state_dict(weights)
    else:
        done = 0
    fabric.barrier()
    for batch in fabric.setup_dataloaders(DataLoader(samples(), batch_size=4)):
        if done < num_steps:
            fabric.backward(squares(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if fabric.is_global_zero:
                torch.save((done, net.state_dict()), folder / "own")


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file, when it was written, and its content."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_that_goes_on_keeps_its_checkpoints_and_is_verified_from_the_last_one(
    tmp_path: Path, strategy: str
) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch(resumes, tmp_path, 3)
    (tmp_path / "000004-step-4").mkdir()
    (tmp_path / "000004-step-4" / "t.0.bin").write_bytes(b"a save in progress")
    before = files(tmp_path)
    assert "000003-step-3/manifest.json" in before
    verdict = verify(resumes, tmp_path, 9, strategy=strategy, steps=4)
    assert verdict.is_equal, verdict.sentence
    assert len(verdict.run.steps) == 4
    assert files(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [2, 6], ids=["finished", "in_its_middle"])
def test_a_program_that_resumes_from_the_run_before_it_is_told_so(tmp_path: Path, num_steps: int) -> None:
    verdict = verify(resumes_by_itself, tmp_path, num_steps, strategy="ddp", steps=2)
    assert verdict.sentence.startswith("Nothing was compared")
    hint = "does it resume a run that has ended?"
    why = "The program resumes from a file that the run before it has written by itself."
    assert verdict.causes[0].startswith(why) if verdict.causes else hint in verdict.sentence
    assert bool(verdict.causes) == (num_steps == 6)


WRONG = {
    a_gather_without_gradients: ("step 1: the gradient of `0.weight`", "The loss uses what was gathered at fabric."),
    a_sum_over_samples: ("is 1/2 times (one over the number of ranks)", "a loss that is a sum over samples"),
    a_mean_over_tokens: ("the gradient of `0.weight`", "samples or tokens in this step"),
    a_mean_over_a_short_last_batch: ("step 3", "samples or tokens in this step"),
    batch_norm: ("the gradient of `0.weight`", "BatchNorm1d normalises by the statistics of each rank's batch"),
    a_loss_times_the_world_size: (
        "is 2 times (the number of ranks) that of one process",
        "off by the number of ranks (2)",
    ),
    a_loss_over_the_world_size: (
        "is 1/2 times (one over the number of ranks) that of one process",
        "off by the number of ranks (2)",
    ),
    dropout_as_a_function: ("Nothing was compared", "Random numbers are drawn in forward"),
    random_augmentation: ("Nothing was compared", "random augmentation"),
    data_of_no_prepared_loader: ("the gradient of `0.weight`", "reads data that no prepared loader gives it"),
    a_learning_rate_times_the_world_size: (
        "step 1: the weight of",
        "The learning rate is 0.02, and 0.01 in one process",
    ),
    a_model_that_each_run_draws_anew: (
        "part in the start: the initial weight",
        "Seed the program before it makes the model",
    ),
    weights_changed_between_steps: ("step 2: the gradient", "changed outside of an optimizer's step"),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_a_wrong_program_parts_where_it_is_wrong_and_the_first_cause_is_the_right_one(
    program: Callable[..., None], strategy: str
) -> None:
    verdict = verify(program, strategy=strategy, steps=4)
    assert not verdict.is_equal
    sentence, cause = WRONG[program]
    assert sentence in verdict.sentence
    assert cause in verdict.causes[0]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class SlightlyWrong(nn.Module):
    """Its middle layer has a gradient that is too large by one part in a thousand, on several ranks."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            weight = Scaled.apply(layer.weight, self.factor if number == 1 else 1.0)
            inputs = nn.functional.linear(inputs, weight, layer.bias).tanh()
        return inputs.sum(1, keepdim=True)


def a_gradient_wrong_by_a_thousandth(fabric: Fabric) -> None:
    trained(fabric, lambda: SlightlyWrong(1.001 if fabric.world_size > 1 else 1.0))


@pytest.mark.slow
def test_a_gradient_that_is_wrong_by_one_part_in_a_thousand_is_found_at_its_layer() -> None:
    verdict = verify(a_gradient_wrong_by_a_thousandth, steps=2)
    assert not verdict.is_equal
    assert "in step 1: the gradient of `layers.1.weight`" in verdict.sentence


def gradients_of_zero(fabric: Fabric) -> None:
    trained(fabric, scale=0.0)


def no_step(fabric: Fabric) -> None:
    set_up(fabric, mlp())


def a_rate_of_zero(fabric: Fabric) -> None:
    trained(fabric, lr=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (gradients_of_zero, "all gradients are zero"),
        (no_step, "the program took no step of a prepared optimizer (does it resume a run that has ended?)"),
        (a_rate_of_zero, "no weight has changed"),
    ],
)
def test_a_dead_run_is_not_equal(program: Callable[..., None], reason: str) -> None:
    verdict = verify(program, steps=2)
    assert not verdict.is_equal
    assert verdict.sentence == f"Nothing was compared: under ddp on 2 ranks, {reason}."


SCRIPT = """
import sys
import torch
from torch import nn
from fabric import CheckpointDirectory, Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
for batch in fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(64, 4), 4)):
    fabric.backward(model(batch).square().mean() * float(sys.argv[1]))
    optimizer.step()
    optimizer.zero_grad()
"""


def command(*arguments: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run `fabric verify`. It starts the program as a fork; with an interpreter of its own it does so in the test of
    signals, and in test_verified_examples.py."""
    return template.run(
        [sys.executable, "-m", "fabric", "verify", *arguments],
        cwd=at,
        env={**os.environ, "TMPDIR": str(at), template.FORKS: "yes"},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_the_command_verifies_a_script_and_a_saved_record_serves_as_reference(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = command("--steps", "3", "--save", "record", "--json", "train.py", "1.0", at=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["equal"]
    assert [step["step"] for step in found["steps"]] == [1, 2, 3]
    started = [line.partition(": ")[2] for line in ended.stderr.splitlines()]
    ways = ("as asked", "in one process", "in one process, permuted")
    assert started == [
        f"the program runs {way}: 3 steps of each optimizer, checkpoints in a temporary folder" for way in ways
    ]
    assert found["steps"][0]["run"]["loss"] == pytest.approx(found["steps"][0]["reference"]["loss"])
    assert (tmp_path / "record").stat().st_size < 5000
    doubled = command("--steps", "3", "--against", "record", "--strategy", "fsdp", "train.py", "2.0", at=tmp_path)
    assert doubled.returncode == 1
    said = " ".join(doubled.stdout.split())
    assert (
        "the gradient of `weight` under fsdp on 2 ranks is 2 times (the number of ranks) that of ddp on 2 ranks" in said
    )
    (tmp_path / "half").write_bytes((tmp_path / "record").read_bytes()[:40])
    refused = command("--against", "half", "train.py", "1.0", at=tmp_path)
    assert refused.returncode == 2
    assert "`half` is no complete record of `fabric verify --save`" in refused.stderr
    assert not list(tmp_path.glob("*.part"))


def kept(tmp_path: Path, program: Callable[..., None], **options: Any) -> Record:
    """The record of one process."""
    recorder = Recorder(Recording(path=str(tmp_path / "record"), num_steps=2), "single_device")
    with pytest.raises(SystemExit):
        program(Fabric(accelerator="cpu", devices=1, plugins=[recorder], **options))
    return Record.load(tmp_path / "record")


def without_loader(fabric: Fabric) -> None:
    model, optimizer = set_up(fabric, nn.Linear(8, 1))
    for _ in range(2):
        fabric.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_a_verdict_says_that_no_prepared_loader_was_read(tmp_path: Path) -> None:
    known = kept(tmp_path, without_loader)
    verdict = judge(known, known, replace(known, strategy="ddp", num_ranks=2), None)
    assert verdict.is_equal
    words = "No prepared loader was read: if all ranks read the same data, use `fabric.setup_dataloaders`."
    assert words in verdict.sentence


def one_model_without_fabric_backward(fabric: Fabric) -> None:
    torch.manual_seed(0)
    (first, by_first), (second, by_second) = (set_up(fabric, nn.Linear(8, 1), SGD) for _ in range(2))
    for inputs, _ in fabric.setup_dataloaders(DataLoader(samples(), 8)):
        fabric.backward(first(inputs).square().mean(), model=first)
        by_first.step()
        second(inputs).square().mean().backward()
        by_second.step()
        by_first.zero_grad()
        by_second.zero_grad()


def no_fabric_backward(fabric: Fabric) -> None:
    torch.manual_seed(0)
    model, optimizer = set_up(fabric, mlp())
    for inputs, _ in fabric.setup_dataloaders(DataLoader(samples(), 8)):
        model(inputs).square().mean().backward()
        optimizer.step()


def two_optimizers_of_one_model(fabric: Fabric) -> None:
    torch.manual_seed(0)
    net = mlp()
    model, first, second = fabric.setup(net, SGD(net[0].parameters(), 0.1), SGD(net[3].parameters(), 0.1))  # type: ignore[index, call-overload]
    for inputs, _ in fabric.setup_dataloaders(DataLoader(samples(), 8)):
        fabric.backward(model(inputs).square().mean())
        for optimizer in (first, second):
            optimizer.step()
        model.zero_grad()


def test_a_step_without_a_backward_of_fabric_is_named_and_has_no_numbers(tmp_path: Path) -> None:
    known = kept(tmp_path, one_model_without_fabric_backward)
    verdict = judge(known, known, replace(known, strategy="ddp", num_ranks=2), None)
    assert verdict.is_equal
    words = " No `fabric.backward` ran before step 2, 4: only the weights were compared there."
    assert verdict.sentence.endswith(words)
    assert [list(step["run"]) for step in as_json(verdict)["steps"]] == 2 * [
        ["loss", "gradient norm", "learning rate"],
        ["learning rate"],
    ]
    known = kept(tmp_path, no_fabric_backward)
    verdict = judge(known, known, known, None)
    assert not verdict.is_equal
    assert verdict.sentence.endswith("no `fabric.backward` ran before any step.")
    known = kept(tmp_path, two_optimizers_of_one_model)
    verdict = judge(known, known, known, None)
    assert verdict.is_equal
    assert "ran before step" not in verdict.sentence
    first, second, *_ = (step["run"] for step in as_json(verdict)["steps"])
    assert first == second | {"learning rate": 0.1}
    assert list(first) == ["loss", "gradient norm", "learning rate"]


def test_the_sum_of_losses_is_named_so_and_several_causes_are_possible_ones(tmp_path: Path) -> None:
    known = kept(tmp_path, sums_with_weights_in_windows)
    verdict = judge(known, known, known, None)
    assert list(as_json(verdict)["steps"][0]["run"]) == ["sum of losses", "gradient norm", "learning rate"]
    console = Console(file=io.StringIO(), width=200)
    show(replace(verdict, causes=["one", "two"]), console)
    assert console.file.getvalue().endswith("\nPossible causes, the likeliest first:\n- one\n- two\n")  # type: ignore[attr-defined]


def test_a_strategy_with_options_is_not_replaced_by_one_without() -> None:
    recording = json.dumps({"path": "record", "num_steps": 2, "in_place_of": None})
    environ = as_variable({"strategy": "fsdp", "record": recording}, ProgramId.current())
    assert Request.build({"strategy": "ddp"}, environ).strategy == "fsdp"
    words = (
        r"says `Fabric\(strategy=DDPStrategy\(...\)\)` and .* Leave one of them out, or name .*`register_strategy`, and"
    )
    with pytest.raises(ValueError, match=words):
        Request.build({"strategy": DDPStrategy(static_graph=True)}, environ)


def test_a_record_that_is_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    kept(tmp_path, a_plain_loop)
    whole = (tmp_path / "record").read_bytes()
    for place in range(11, len(whole), 97):
        (tmp_path / "damaged").write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="damaged` is no complete record of `fabric verify --save`: "):
            Record.load(tmp_path / "damaged")


def test_the_record_of_another_model_is_refused_with_the_first_name_that_differs(tmp_path: Path) -> None:
    known = kept(tmp_path, a_plain_loop)
    renamed = replace(known, shapes={name.replace("3.", "head."): shape for name, shape in known.shapes.items()})
    words = "is the record of another model: the shape of `{}` is {} in this program, and {} in the record. Record"
    with pytest.raises(ValueError, match=re.escape(words.format("head.weight", [1, 16], "unknown"))):
        _refuse_other_model(known, renamed, "record")
    wider = replace(known, shapes={**known.shapes, "0.weight": [32, 8]})
    with pytest.raises(ValueError, match=re.escape(words.format("0.weight", [32, 8], [16, 8]))):
        _refuse_other_model(known, wider, "record")
    _refuse_other_model(known, known, "record")


def test_runs_of_different_lengths_are_compared_unless_a_program_ended_early(tmp_path: Path) -> None:
    known = kept(tmp_path, a_plain_loop)
    shorter = replace(known, steps=known.steps[:1])
    assert judge(known, None, shorter, None).is_equal
    ended = judge(known, None, replace(shorter, ended="program"), None)
    assert not ended.is_equal
    assert ended.sentence == "The program takes 1 steps under single_device on 1 rank, and 2 in one process."
    both = judge(known, None, replace(known, ended="program"), None)
    assert both.sentence.endswith("The program ended then, before the number of steps that was asked for.")


def raises_in_one_process(fabric: Fabric) -> None:
    if fabric.world_size == 1:
        raise KeyError("mine")
    trained(fabric)


@pytest.mark.slow
def test_a_function_that_fails_in_the_reference_says_so() -> None:
    with pytest.raises(ProgramError, match=r"^The program failed in one process:\n(?s:.*)KeyError: 'mine'$"):
        verify(raises_in_one_process, steps=1)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`steps` is 0. Write the number of steps to compare, from 1."):
        verify(a_plain_loop, steps=0)
    with pytest.raises(ValueError, match=r"`tolerance` is -1. Write a part of a tensor's norm, from 0 to below 1."):
        verify(a_plain_loop, tolerance=-1)
    with pytest.raises(ProgramError, match=r"^`strategy='nonsense'` is not known. Write 'auto' or one of "):
        verify(a_plain_loop, strategy="nonsense")


@pytest.mark.slow
def test_a_module_is_verified_against_another_strategy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = command("--steps", "2", "--strategy", "fsdp", "--against", "ddp", "-m", "train", "1.0", at=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "The numbers of ddp on 2 ranks: fsdp on 2 ranks is equal in 2 steps" in " ".join(said.stdout.split())
    unknown = command("--against", "dpp", "train.py", "1.0", at=tmp_path)
    words = "\nfabric verify: `--against dpp` is neither a file of `--save` nor a strategy. Did you mean 'dp'? Write "
    assert unknown.returncode == 2
    assert words in unknown.stderr
    refused = command("--save", "nowhere/record", "train.py", "1.0", at=tmp_path)
    assert (
        refused.stderr == "fabric verify: `nowhere/record` cannot be written: `nowhere` is no folder. Make it first.\n"
    )
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(("__pycache__", "torchinductor"))}
    assert names == {"train.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise KeyError('mine')", "The program failed as asked:"),
        ("print('no fabric')", "it launches no `Fabric`"),
        (SCRIPT.replace("torch.manual_seed(0)", "1 / (fabric.world_size - 1)"), "The program failed in one process:"),
    ],
    ids=["raises", "without a fabric", "raises in the reference"],
)
def test_a_program_without_a_record_is_a_sentence_with_its_output(script: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    ended = command("train.py", "1.0", at=tmp_path)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert ended.stderr.count("Traceback") == ("raise" in script or "1 /" in script)
    missing = command("nowhere.py", at=tmp_path)
    assert missing.returncode == 2
    assert "`nowhere.py` is not a file" in missing.stderr


def left(folder: Path) -> list[str]:
    """The processes that run the script of this folder."""
    lines = [each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline") if each.exists()]
    return [line.decode() for line in lines if str(folder).encode() in line]


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_nothing_is_left_of_a_verification_that_is_ended_by_a_signal(number: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("for batch", "open('begun', 'w').close(); import time\nfor batch")
    )
    script = (tmp_path / "train.py").read_text().replace("    optimizer.step()", "    time.sleep(60)")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "temporary").mkdir()
    verifying = template.Popen(
        [sys.executable, "-m", "fabric", "verify", str(tmp_path / "train.py"), "1.0"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )
    until(lambda: (tmp_path / "begun").exists())
    assert left(tmp_path)
    for _ in range(2):  # a second Ctrl-C does not interrupt the removal of the record
        verifying.send_signal(number)
    assert verifying.wait(60) == 128 + number
    until(lambda: not left(tmp_path))
    assert not list((tmp_path / "temporary").glob("fabric-verify-*"))


PAGE = Path(__file__).parents[3] / "docs/how-to/verify.md"


def rounded(text: str) -> str:
    """The words of a text, with figures to three digits, and rounding errors as nothing."""

    def short(found: re.Match[str]) -> str:
        number = float(found[0])
        return f"{number:.3g}" if number > 1e-4 else "0"

    return " ".join(re.sub(r"\d+\.\d+(e[-+]\d+)?", short, text).split())


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("factor", "steps"), [("", "2"), (" / fabric.world_size", "1")], ids=["good", "bad"])
def test_the_page_shows_what_the_command_prints(factor: str, steps: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace(" * float(sys.argv[1])", factor))
    ended = command("--strategy", "fsdp", "--steps", steps, "train.py", at=tmp_path)
    assert ended.returncode == bool(factor), ended.stderr
    assert rounded(ended.stdout) in rounded(PAGE.read_text())
