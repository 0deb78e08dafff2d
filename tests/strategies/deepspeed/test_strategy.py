"""ZeRO by DeepSpeed gives the numbers of one process of plain PyTorch, and leaves nothing behind.

Each scenario is written once and run twice: on ranks with a fabric, and here without one. A world runs all of them, for
starting DeepSpeed takes longer than training.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR
from worlds import run_world

from fabric import Fabric, read_checkpoint
from fabric.launchers.world import World
from fabric.strategies.deepspeed.strategy import DeepSpeedStrategy

SHARDED = {"stage3_param_persistence_threshold": 0}  # small weights are cut as well
BUCKET = 10_000


class Net(nn.Module):
    """Tied weights, a frozen one, a buffer, a branch that some steps leave out; sizes that no world divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.branch = nn.Linear(5, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("shift", torch.full((5,), 0.25))

    def forward(self, tokens: Tensor, branch: bool = True) -> Tensor:
        hidden = self.norm(self.frozen(self.embed(tokens)) + self.shift)
        if branch:
            hidden = hidden + self.branch(hidden).tanh()
        return self.out(hidden)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens), targets)


class Plain:
    """The words of a fabric, in one process of plain PyTorch."""

    world_size, global_rank = 1, 0

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        return (module, *optimizers)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def clip_gradients(self, model: nn.Module, optimizer: Optimizer, **how: Any) -> Tensor | None:
        if "clip_val" in how:
            return nn.utils.clip_grad_value_(model.parameters(), how["clip_val"])
        return nn.utils.clip_grad_norm_(model.parameters(), how["max_norm"], how.get("norm_type", 2.0))


def strategy_of(stage: int, offload: bool = False, **options: Any) -> DeepSpeedStrategy:
    zero = {"reduce_bucket_size": BUCKET, **(SHARDED if stage == 3 else {})}
    return DeepSpeedStrategy(stage=stage, offload_optimizer=offload, config={"zero_optimization": zero, **options})


def fabric_of(world: World, strategy: DeepSpeedStrategy, precision: str = "32-true") -> Fabric:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size, precision=precision)
    fabric._connect(world)
    return fabric


def parts(make: Callable[[Any], Optimizer], seed: int = 3) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    norms = list(model.norm.parameters())
    others = [p for p in model.parameters() if all(p is not norm for norm in norms)]
    return model, make([{"params": others}, {"params": norms, "lr": 0.02}])


def sgd(groups: Any) -> Optimizer:
    return SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(groups: Any) -> Optimizer:
    return AdamW(groups, lr=0.05, eps=1e-3)


def batch(fabric: Any, step: int) -> tuple[Tensor, Tensor]:
    """This rank's share of the global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    both = torch.randint(7, (2, 8), generator=generator)
    tokens, targets = both.chunk(fabric.world_size, dim=1)[fabric.global_rank]
    return tokens, targets


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
    return nn.functional.cross_entropy(model(data[0], **kwargs), data[1])


# Scenarios: each gives what must be equal


def simple_steps(fabric: Any, folder: str) -> Any:
    model, optimizer = fabric.setup(*parts(adamw))
    for step in range(4):
        fabric.backward(loss_of(model, batch(fabric, step)))
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, folder, model)


def backwards_add_up_without_a_word(fabric: Any, folder: str) -> Any:
    model, optimizer = fabric.setup(*parts(sgd))
    for step in range(3):
        first, second, third = (loss_of(model, batch(fabric, 3 * step + i)) for i in (0, 1, 2))
        fabric.backward(first)  # three forwards, then three backwards
        fabric.backward(second)
        fabric.backward(third)
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, folder, model)


def zero_grad_discards(fabric: Any, folder: str) -> Any:
    model, optimizer = fabric.setup(*parts(sgd))
    for step in range(3):
        fabric.backward(loss_of(model, batch(fabric, 50 + step)))
        optimizer.zero_grad()
        optimizer.step()  # nothing to step with
        fabric.backward(loss_of(model, batch(fabric, step)))
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, folder, model)


def clips_to_what_each_call_asks_for(fabric: Any, folder: str) -> Any:
    model, optimizer = fabric.setup(*parts(sgd))
    norms = []
    hows: list[dict[str, float]] = [
        {"max_norm": 0.05}, {"max_norm": 0.1, "norm_type": 1.0}, {"max_norm": 0.01, "norm_type": float("inf")},
        {"clip_val": 0.003}, {}, {"max_norm": 1e9},
    ]  # fmt: skip
    for step, how in enumerate(hows):
        fabric.backward(loss_of(model, batch(fabric, step)) * 20)
        if how:
            norms.append(fabric.clip_gradients(model, optimizer, **how))
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, folder, model), [float(norm) for norm in norms if norm is not None]


def a_part_left_out_has_a_gradient_of_zero(fabric: Any, folder: str) -> Any:
    model, optimizer = fabric.setup(*parts(sgd))
    for step in range(5):
        if step == 3:  # what was there is discarded, and no step has come between
            fabric.backward(loss_of(model, batch(fabric, 50)))
            optimizer.zero_grad(set_to_none=False)
        fabric.backward(loss_of(model, batch(fabric, step), branch=step not in (1, 3)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return whole(fabric, folder, model)


def schedulers_and_hooks_see_each_step_once(fabric: Any, folder: str) -> Any:
    model, optimizer = parts(sgd)
    early = StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    late = StepLR(optimizer, step_size=2, gamma=0.5)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    rates = []
    for step in range(3):
        fabric.backward(loss_of(model, batch(fabric, step)))
        optimizer.step()
        optimizer.zero_grad()
        early.step()
        late.step()
        rates.append([group["lr"] for group in optimizer.param_groups])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(fabric, 9))
        fabric.backward(loss)
        return loss

    returned = optimizer.step(closure)
    assert type(optimizer) is SGD
    assert seen == ["before", "after"] * 4
    return whole(fabric, folder, model), rates, mean(fabric, returned)


def two_models_train_each_other(fabric: Any, folder: str) -> Any:
    one, for_one = fabric.setup(*parts(sgd, seed=1))
    other, for_other = fabric.setup(*parts(adamw, seed=2))
    for step in range(3):
        tokens, targets = batch(fabric, step)
        through_both = (other(tokens) * one(tokens).softmax(-1)).sum(-1).mean()
        fabric.backward(through_both)
        for_one.step()
        for_one.zero_grad()
        for_other.zero_grad()  # what flowed through it on the way is not for this step
        fabric.backward(loss_of(other, (tokens, targets)))
        for_other.step()
        for_other.zero_grad()
    return whole(fabric, folder, one), whole(fabric, folder, other)


def several_backwards_through_one_forward(fabric: Any, folder: str) -> Any:
    model, optimizer = fabric.setup(*parts(sgd))
    for step in range(2):
        loss = loss_of(model, batch(fabric, step))
        fabric.backward(loss, retain_graph=True)
        fabric.backward(loss * 2)
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, folder, model)


def evaluation_between_steps_changes_nothing(fabric: Any, folder: str) -> Any:
    model, optimizer = fabric.setup(*parts(adamw))
    outputs = []
    for step in range(2):
        fabric.backward(loss_of(model.train(), batch(fabric, step)))
        with torch.no_grad():
            outputs.append(float(model.eval()(torch.arange(7)).sum()))
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, folder, model), outputs


def an_optimizer_that_has_stepped_before_goes_on(fabric: Any, folder: str) -> Any:
    model, optimizer = parts(adamw)
    for step in range(2):
        loss_of(model, batch(Plain, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = fabric.setup(model, optimizer)
    fabric.backward(loss_of(model, batch(fabric, 5)))
    optimizer.step()
    return whole(fabric, folder, model)


SCENARIOS = (
    simple_steps,
    backwards_add_up_without_a_word,
    zero_grad_discards,
    clips_to_what_each_call_asks_for,
    a_part_left_out_has_a_gradient_of_zero,
    schedulers_and_hooks_see_each_step_once,
    two_models_train_each_other,
    evaluation_between_steps_changes_nothing,
    an_optimizer_that_has_stepped_before_goes_on,
)


def scenarios_of(strategy: DeepSpeedStrategy) -> tuple[Callable[[Any, str], Any], ...]:
    return SCENARIOS if strategy.stage == 3 else (*SCENARIOS, several_backwards_through_one_forward)


def whole(fabric: Any, folder: str, model: nn.Module) -> dict[str, Tensor]:
    """The weights, as a file shows them to plain PyTorch."""
    if isinstance(fabric, Plain):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    path = os.path.join(folder, "weights.pt")
    fabric.save(path, {"model": model})
    weights: dict[str, Tensor] = read_checkpoint(path)["model"]
    fabric.barrier()
    return weights


def mean(fabric: Any, value: Tensor) -> float:
    return float(value.detach() if isinstance(fabric, Plain) else fabric.all_reduce(value.detach()))


def all_scenarios(world: World, strategy: DeepSpeedStrategy, folder: str) -> list[Any]:
    results = []
    for scenario in scenarios_of(strategy):
        with fabric_of(world, strategy) as fabric:  # one fabric after another, in one process
            results.append(scenario(fabric, folder))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "size", "offload"),
    [
        (1, 2, False),
        pytest.param(2, 4, True, marks=pytest.mark.thorough),
        pytest.param(3, 2, False, marks=pytest.mark.thorough),
        pytest.param(2, 2, False, marks=pytest.mark.thorough),
        pytest.param(3, 2, True, marks=pytest.mark.thorough),
    ],
)
def test_zero_equals_one_process(stage: int, size: int, offload: bool, tmp_path: Path) -> None:
    strategy = strategy_of(stage, offload)
    results = run_world(size, all_scenarios, strategy, str(tmp_path))[0]
    for scenario, result in zip(scenarios_of(strategy), results, strict=True):
        expected = scenario(Plain(), "")
        torch.testing.assert_close(
            result, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=scenario.__name__: f"{name}: {text}"
        )


# Saving and loading


def save_and_go_on(world: World, strategy: DeepSpeedStrategy, path: str, folder: str) -> Any:
    with fabric_of(world, strategy) as fabric:
        model, optimizer = fabric.setup(*parts(adamw))
        for step in range(3):
            one_step(fabric, model, optimizer, step)
        model.norm.requires_grad_(False)  # for a while, as a critic in the steps of its generator
        fabric.save(path, {"model": model, "optimizer": optimizer})
        fabric.state_dict(model, optimizer)
        model.norm.requires_grad_(True)
        one_step(fabric, model, optimizer, 3)
        return whole(fabric, folder, model)


def load_and_go_on(world: World, strategy: DeepSpeedStrategy, path: str, folder: str, step_first: bool) -> Any:
    with fabric_of(world, strategy) as fabric:
        with fabric.init_module(empty_init=not step_first):
            model, optimizer = parts(adamw, seed=77)
        model, optimizer = fabric.setup(model, optimizer)
        if step_first:
            one_step(fabric, model, optimizer, 40)  # state of its own, to be replaced
        model.norm.requires_grad_(False)
        fabric.load(path, {"model": model, "optimizer": optimizer})
        model.norm.requires_grad_(True)
        one_step(fabric, model, optimizer, 3)
        return whole(fabric, folder, model)


def save_each_and_load_each(world: World, paths: dict[int, str], folder: str) -> list[Any]:
    results = [save_and_go_on(world, strategy_of(stage), path, folder) for stage, path in paths.items()]
    return results + load_each(world, paths, folder)


def load_each(world: World, paths: dict[int, str], folder: str) -> list[Any]:
    pairs = [(strategy_of(stage, offload=stage != saved), path) for saved, path in paths.items() for stage in (1, 2, 3)]
    return [
        load_and_go_on(world, strategy, path, folder, bool(number % 2)) for number, (strategy, path) in enumerate(pairs)
    ]


def one_step(fabric: Any, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    fabric.backward(loss_of(model, batch(fabric, step)))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_checkpoint_is_plain_and_resumes_under_another_stage_and_world_size(tmp_path: Path) -> None:
    paths = {stage: str(tmp_path / f"saved{stage}.pt") for stage in (1, 2, 3)}
    results = run_world(2, save_each_and_load_each, paths, str(tmp_path))[0]
    results += run_world(4, load_each, {3: paths[3]}, str(tmp_path))[0]
    for path in paths.values():
        content = read_checkpoint(path)
        model, optimizer = parts(adamw)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        one_step(Plain(), model, optimizer, 3)
        results.append(dict(model.state_dict()))
    for number, result in enumerate(results):
        torch.testing.assert_close(
            result, results[0], rtol=1e-5, atol=1e-5, msg=lambda text, number=number: f"{number}: {text}"
        )


def load_misfits(world: World, path: str) -> list[str]:
    sentences = []
    for stage in (2, 3):
        with fabric_of(world, strategy_of(stage)) as fabric:
            model, optimizer = fabric.setup(*parts(sgd))
            for state in ({"model": model}, {"optimizer": optimizer}):
                sentences.append(sentence_of(lambda state=state: fabric.load(path, state)))
    return sentences


@pytest.mark.slow
def test_a_checkpoint_that_does_not_match_raises_with_the_mismatches(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    content = {"model": model.state_dict(), "optimizer": AdamW(model.parameters()).state_dict()}
    torch.save(content, tmp_path / "other.pt")
    for rank in run_world(2, load_misfits, str(tmp_path / "other.pt")):
        missing_2, groups_2, missing_3, groups_3 = rank
        assert missing_2 == missing_3
        words = " ".join(missing_2.split())
        assert "model: branch.bias (" in words
        assert "model: weight missing (2, 2) model: bias missing (2,)" in words
        assert groups_2 == groups_3
        assert "groups of [5, 2] parameters groups of [2]" in " ".join(groups_2.split())


# Precision and evaluation


def other_ways(world: World, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision in ("bf16-true", "bf16-mixed"):
        for stage in (1, 2, 3):
            with fabric_of(world, strategy_of(stage), precision) as fabric:
                model, optimizer = fabric.setup(*parts(adamw))
                for step in range(4):
                    output = model(batch(fabric, step)[0])
                    fabric.backward(nn.functional.cross_entropy(output.float(), batch(fabric, step)[1]))
                    optimizer.step()
                    optimizer.zero_grad()
                found[f"{precision} {stage}"] = output.dtype, whole(fabric, folder, model)
    for stage, when in ((1, "before"), (2, "after")):
        with fabric_of(world, strategy_of(stage)) as fabric:
            model, optimizer = parts(adamw)
            model, optimizer = fabric.setup(compiled(model) if when == "before" else model, optimizer)
            model = compiled(model) if when == "after" else model
            for step in range(4):
                one_step(fabric, model, optimizer, step)
            found[f"compiled {when}"] = whole(fabric, folder, model)
    for stage in (1, 2, 3):
        with fabric_of(world, strategy_of(stage)) as fabric:
            torch.manual_seed(3 + world.rank)  # the weights and buffers of rank 0 are taken
            net = Net()
            net.shift += world.rank
            model = fabric.setup_module(net)
            with torch.no_grad():
                found[f"evaluated {stage}"] = model(torch.arange(7))
            found[f"evaluated file {stage}"] = whole(fabric, folder, model)
            found[f"evaluated backward {stage}"] = sentence_of(lambda: fabric.backward(torch.ones(())))
    return found


@pytest.mark.slow
def test_other_precisions_and_evaluation(tmp_path: Path) -> None:
    found, on_rank_one = run_world(2, other_ways, str(tmp_path))
    expected = simple_steps(Plain(), "")
    for when in ("before", "after"):
        torch.testing.assert_close(found[f"compiled {when}"], expected, rtol=1e-5, atol=1e-5)
    for precision, dtype in (("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)):
        for stage in (1, 2, 3):
            got_dtype, weights = found[f"{precision} {stage}"]
            assert got_dtype == dtype
            trained = {name: value for name, value in weights.items() if not name.startswith(("frozen", "shift"))}
            assert {value.dtype for value in trained.values()} == {torch.float32}, "the weights that are trained"
            torch.testing.assert_close(trained, {name: expected[name] for name in trained}, rtol=0.1, atol=0.1)
    torch.manual_seed(3)
    plain = Net()
    for stage in (1, 2, 3):
        for each in (found, on_rank_one):
            torch.testing.assert_close(each[f"evaluated {stage}"], plain(torch.arange(7)).detach())
        torch.testing.assert_close(found[f"evaluated file {stage}"], dict(plain.state_dict()), rtol=0, atol=0)
        assert "`Net` was set up without an optimizer, for evaluation" in found[f"evaluated backward {stage}"]


# What it leaves behind, and what it refuses


def compilers() -> list[str]:
    return [name for name in sys.modules if name.startswith("torch._inductor.compile_fx")]


def forget_compilers() -> None:
    """The fork server of this rank may have imported them for another test: who imports them from now on is seen."""
    for name in compilers():
        del sys.modules[name]
    if "torch._inductor" in sys.modules:
        vars(sys.modules["torch._inductor"]).pop("compile_fx", None)


def traces(world: World) -> dict[str, Any]:
    forget_compilers()
    environment, linear, empty = dict(os.environ), nn.functional.linear, torch.empty
    warnings.simplefilter("error")
    model, optimizer = parts(sgd)
    attributes = set(vars(model)), set(vars(optimizer))
    for stage in (1, 2, 3):
        with fabric_of(world, strategy_of(stage)) as fabric:
            same = fabric.setup(*parts(sgd))
            assert type(same[0]) is Net
            assert type(same[1]) is SGD
            one_step(fabric, *same, 0)
            with fabric.init_module():
                nn.Linear(3, 3)
    with fabric_of(world, strategy_of(2)) as fabric:
        assert fabric.setup(model, optimizer) == (model, optimizer)
        one_step(fabric, model, optimizer, 0)
        names = list(model.state_dict())
    return {
        "compilers": compilers(),
        "environment": set(os.environ.items()) ^ set(environment.items()),
        "linear": nn.functional.linear is linear and torch.empty is empty,
        "attributes": (set(vars(model)) - attributes[0], set(vars(optimizer)) - attributes[1]),
        "hooks": (len(model._forward_hooks), len(model._forward_pre_hooks)),
        "names": names == list(Net().state_dict()),
        "plain": pickle.loads(pickle.dumps(model))(torch.arange(7)).shape,
    }


@pytest.mark.slow
def test_closing_removes_every_trace_of_deepspeed_from_the_process_and_the_users_objects(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for rank in run_world(2, traces):
        assert rank == {
            "compilers": [],
            "environment": set(),
            "linear": True,
            "attributes": (set(), {"_opt_called"}),
            "hooks": (0, 0),
            "names": True,
            "plain": (7, 7),
        }
    assert capfd.readouterr().out == ""


class Own(SGD):
    """An optimizer that says what it computes an update from."""

    updates_each = "element"


class Layerwise(SGD):
    """Uses a norm of each tensor."""

    updates_each = "parameter"


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def refusals(world: World) -> dict[str, str]:
    found = {}
    reported = logging.StreamHandler(io.StringIO())
    logging.getLogger("fabric").addHandler(reported)
    with fabric_of(world, strategy_of(2)) as fabric:
        net = Net()
        fabric.setup(net, Own(net.parameters(), lr=0.1))
    with fabric_of(world, strategy_of(2)) as fabric:
        model, optimizer = parts(sgd)
        found["two"] = sentence_of(lambda: fabric.setup(model, optimizer, SGD(model.parameters())))
        for key, first, second in (
            ("dtypes", torch.float32, torch.float64),
            ("complex", torch.complex64, torch.complex64),
        ):
            layers = {"first": nn.Linear(2, 2, False, dtype=first), "second": nn.Linear(2, 2, False, dtype=second)}
            mixed = nn.ModuleDict(layers)
            found[key] = sentence_of(lambda mixed=mixed: fabric.setup(mixed, SGD(mixed.parameters())))
        found["foreign"] = sentence_of(
            lambda: fabric.strategy.setup(fabric._connected.runtime, Net(), [optimizer], True)
        )
        for kind in (Adagrad, torch.optim.LBFGS, torch.optim.Adafactor, Layerwise):
            found[kind.__name__] = sentence_of(lambda kind=kind: fabric.setup(model, kind(model.parameters())))
        model, optimizer = fabric.setup(model, optimizer)
        found["alone"] = sentence_of(lambda: fabric.setup_optimizers(SGD(model.parameters())))
        fabric.backward(loss_of(model, batch(fabric, 0)))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        found["after clipping"] = sentence_of(lambda: fabric.backward(loss_of(model, batch(fabric, 1))))
        optimizer.zero_grad()
        fabric.backward(loss_of(model, batch(fabric, 0)) * float("nan"))
        found["nonfinite"] = sentence_of(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0))
        before = [parameter.clone() for parameter in model.parameters()]
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters())), "a step with gradients that are not finite"
        found["skipped"] = reported.stream.getvalue()
        found["not zeroed"] = sentence_of(optimizer.step)
        optimizer.zero_grad()
        model.mark_forward_method("loss")
        fabric.backward(model.loss(*batch(fabric, 1)))
    with fabric_of(world, strategy_of(3)) as fabric:
        model, optimizer = fabric.setup(*parts(sgd))
        found["compiled"] = sentence_of(lambda: fabric.setup(compiled(Net())))
        bytes_first = Net()
        bytes_first.embed.weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.uint8), requires_grad=False)
        found["bytes"] = sentence_of(lambda: fabric.setup(bytes_first))
        loss = loss_of(model, batch(fabric, 0))
        fabric.backward(loss, retain_graph=True)
        found["twice"] = sentence_of(lambda: fabric.backward(loss))
        found["method"] = sentence_of(lambda: model.mark_forward_method("loss"))
    return found


def left_out(world: World, strategy: DeepSpeedStrategy) -> list[str]:
    """What windows without the branch say, before any step and after one with it. No weight moves in them."""
    reported = []
    with fabric_of(world, strategy) as fabric:
        model, optimizer = fabric.setup(*parts(adamw))
        for step in range(2):
            before = whole_of(fabric, model)
            fabric.backward(loss_of(model, batch(fabric, 2 * step), branch=False))
            reported.append(sentence_of(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0)))
            reported.append(sentence_of(optimizer.step))
            torch.testing.assert_close(whole_of(fabric, model), before, rtol=0, atol=0)
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch(fabric, 2 * step + 1)))
            optimizer.step()
            model.zero_grad()
    return reported


def whole_of(fabric: Fabric, model: nn.Module) -> dict[str, Tensor]:
    return fabric.state_dict(model, all_ranks=True)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True), (3, False)])
def test_a_parameter_without_a_gradient_in_a_window_raises_before_the_step(stage: int, offload: bool) -> None:
    for reported in run_world(2, left_out, strategy_of(stage, offload)):
        assert len(reported) == 4
        for sentence in reported:
            assert (
                "2 parameters of `Net` ('branch.weight', 'branch.bias') got no gradient since the last `st" in sentence
            )
            assert (
                "keep gradients of zero (`optimizer.zero_grad(set_to_none=False)`). Or pass `strategy='fs" in sentence
            )


class Sum(nn.Module):
    """Two layers alike, added in the order of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, names: Sequence[str]) -> Tensor:
        return torch.stack([getattr(self, name)(x) for name in names]).sum()


def paired(world: World, strategy: DeepSpeedStrategy, names: tuple[str, ...]) -> str:
    """What a step says where rank 1 computes with layers of these names, and rank 0 with one and other."""
    with fabric_of(world, strategy) as fabric:
        torch.manual_seed(0)
        model = Sum()
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))

        def step() -> None:
            fabric.backward(model(torch.ones(1, 4), names if fabric.global_rank == 1 else ("one", "other")))
            optimizer.step()

        return sentence_of(step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "names", "words"),
    [
        (False, ("other", "one"), "Number 0 is 'other.weight' on rank 0, and 'one.weight' on rank 1"),
        (False, ("one",), "Number 0 is 'other.weight' on rank 0, and 'one.weight' on rank 1"),
        (True, ("other",), "Number 1 is 'one.weight' on rank 0, and none on rank 1"),
    ],
)
def test_gradients_computed_in_different_orders_raise_instead_of_being_added(
    offload: bool, names: tuple[str, ...], words: str
) -> None:
    for reported in run_world(2, paired, strategy_of(2, offload), names):
        assert words in reported, reported
        assert "of different parameters of `Sum`, or in a different order" in reported


@pytest.mark.slow
def test_unsupported_uses_of_an_engine_raise_with_what_to_write() -> None:
    ranks = run_world(2, refusals)
    assert "DeepSpeed skipped a step of `Net`: its gradients are not finite." in ranks[0]["skipped"]
    assert "A step of `Net` whose gradients were not zeroed since the last step." in ranks[0]["not zeroed"]
    assert ranks[1]["skipped"] == ""
    for found in ranks:
        assert "Compile what `setup` returns, or use stage 2." in found["compiled"]
        assert (
            "first parameter, `embed.weight`, is torch.uint8, but DeepSpeed's stage 3 takes its own" in found["bytes"]
        )
        assert "`setup` was given 2 optimizers for `Net`, and a DeepSpeed engine has one." in found["two"]
        assert "of torch.float32 ('first.weight'), torch.float64 ('second.weight'), and ZeRO" in found["dtypes"]
        assert "of torch.complex64 ('second.weight'), and ZeRO" in found["complex"]
        assert "The `SGD` holds 7 parameters (the first of shape (7, 5)) that `Net` does not have." in found["foreign"]
        assert "`Adagrad` in `setup`: DeepSpeed replaces it by another object" in found["Adagrad"]
        assert "`LBFGS` in `setup` uses whole tensors" in found["LBFGS"]
        assert "`Adafactor` in `setup` uses whole tensors" in found["Adafactor"]
        assert "`Layerwise` in `setup` uses whole tensors" in found["Layerwise"]
        assert "Call `fabric.setup(model, optimizer)`." in found["alone"]
        assert (
            "A backward of `Net` after its gradients were averaged, and before `optimizer.step()`"
            in found["after clipping"]
        )
        assert "have a norm (order 2) of nan, so they cannot be clipped" in found["nonfinite"]
        assert "A second backward through one forward of `Net`: at ZeRO stage 3" in found["twice"]
        assert "`mark_forward_method('loss')`: at ZeRO stage 3" in found["method"]


def sentence_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


def other_optimizers(world: World, folder: str) -> Any:
    results = []
    for make in (RMSprop, Adadelta):
        with fabric_of(world, strategy_of(2)) as fabric:
            torch.manual_seed(1)
            net = Net()
            model, optimizer = fabric.setup(net, make(net.parameters(), eps=1e-3))
            for step in range(3):
                one_step(fabric, model, optimizer, step)
            results.append(whole(fabric, folder, model))
    return results


@pytest.mark.slow
def test_any_elementwise_optimizer_of_torch_works(tmp_path: Path) -> None:
    results = run_world(2, other_optimizers, str(tmp_path))[0]
    for make, result in zip((RMSprop, Adadelta), results, strict=True):
        torch.manual_seed(1)
        model = Net()
        optimizer = make(model.parameters(), eps=1e-3)
        for step in range(3):
            one_step(Plain(), model, optimizer, step)
        torch.testing.assert_close(result, dict(model.state_dict()), rtol=1e-5, atol=1e-5)


def train_in_groups(fabric: Fabric, kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    first, last = list(net[0].parameters()), list(net[2].parameters())
    if kind == "frozen":
        net[0].requires_grad_(False)
    groups: Any = {
        "empty first": [{"params": [], "lr": 3.0}, {"params": first}, {"params": last, "lr": 0.5}],
        "empty between": [{"params": first}, {"params": []}, {"params": last, "lr": 0.5}],
        "frozen": [{"params": first}, {"params": last, "lr": 0.5}, {"params": []}],
        "nothing": [{"params": []}],
    }[kind]
    model, optimizer = fabric.setup(net, SGD(groups, lr=0.1, momentum=0.9))
    for step in range(3):
        fabric.backward((model(torch.linspace(-1, step, 8, device=fabric.device).view(2, 4)) - 1).square().mean())
        optimizer.param_groups[-1]["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    state = fabric.state_dict(model, optimizer, all_ranks=True)
    assert [len(group["params"]) for group in state[1]["param_groups"]] == [len(each["params"]) for each in groups]
    return list(state[0].values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["empty first", "empty between", "frozen"])
def test_groups_without_trained_parameters_are_left_as_they_are(stage: int, kind: str) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        expected = train_in_groups(fabric, kind)
    strategy = DeepSpeedStrategy(stage=stage)
    with Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver") as fabric:
        torch.testing.assert_close(fabric.launch(train_in_groups, kind), [each.cpu() for each in expected])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_trains_nothing_is_refused(stage: int) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1, strategy=DeepSpeedStrategy(stage=stage))
    with pytest.raises(Exception, match="The `SGD` holds no parameter that requires a gradient"):
        fabric.launch(train_in_groups, "nothing")


def set_up_an_average(fabric: Fabric) -> float:
    net = nn.Linear(4, 1)
    averaged = fabric.setup_module(torch.optim.swa_utils.AveragedModel(net))
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 4, device=fabric.device)).sum(), model=model)
    optimizer.step()
    averaged.update_parameters(model)
    with torch.no_grad():
        inputs = torch.ones(2, 4, device=fabric.device)
        return float((averaged(inputs) - model(inputs)).abs().max())


@pytest.mark.slow
def test_an_average_of_weights_that_would_stay_as_it_is_raises_at_stage_3() -> None:
    for stage in (2, 3):
        strategy = DeepSpeedStrategy(stage=stage)
        with Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver") as fabric:
            if stage == 2:
                assert fabric.launch(set_up_an_average) == pytest.approx(0, abs=1e-6)
            else:
                with pytest.raises(Exception, match=r"would copy nothing. Write `average = fabric.ema"):
                    fabric.launch(set_up_an_average)
