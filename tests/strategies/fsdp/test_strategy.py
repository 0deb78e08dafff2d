"""Shards train as one process does, and go to plain checkpoints and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from sharding import Block, Net, Recipe, batches, make, train_all, train_plain
from torch import Tensor, nn
from worlds import run_world

from fabric import Fabric, read_checkpoint
from fabric.launchers.world import World
from fabric.strategies import DDPStrategy, FSDPStrategy, Strategy
from fabric.strategies.accelerators.accelerator import CPUAccelerator
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.precision.precision import Precision
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.dtensor import local_part

RECIPES = [
    Recipe(clip={"max_norm": 0.1}),
    Recipe(optimizer="adamw", accumulate=2, clip={"clip_val": 0.01}),
    Recipe(optimizer="adamw", seed=1, clip={"max_norm": 0.05, "norm_type": float("inf")}),
]


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def fabric_with(size: int, strategy: Strategy | str | None = None, precision: Any = "32-true") -> Fabric:
    chosen = strategy or FSDPStrategy(auto_wrap_policy={Block})
    return Fabric(accelerator=ACCELERATOR, devices=size, strategy=chosen, precision=precision, launcher="forkserver")


def connect(world: World, strategy: FSDPStrategy | None = None, precision: Any = "32-true") -> Runtime:
    chosen = strategy or FSDPStrategy()
    return chosen.connect(world, CPUAccelerator(), [0] * world.size, Precision.parse(precision))


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (1, FSDPStrategy()),
        (2, FSDPStrategy(auto_wrap_policy=Block, activation_checkpointing_policy=Block, reshard_after_forward=True)),
        (4, FSDPStrategy(auto_wrap_policy=is_block, device_mesh=(2, 2))),
        (4, FSDPStrategy(auto_wrap_policy={Block}, reshard_after_forward=2)),
    ],
    ids=["one", "recomputed", "replicas", "resharded"],
)
def test_losses_norms_weights_and_moments_equal_those_of_one_process(
    size: int, strategy: FSDPStrategy, tmp_path: Path
) -> None:
    runs = fabric_with(size, strategy).launch(train_all, RECIPES, str(tmp_path))
    assert runs is not None
    for recipe, run in zip(RECIPES, runs, strict=True):
        assert run is not None
        expected = train_plain(recipe)
        close((run.losses, run.norms), (expected.losses, expected.norms))
        close(run.weights, dict(expected.weights))
        close(run.moments, expected.moments)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_checkpoint_goes_between_shards_replicas_and_plain_torch(size: int, tmp_path: Path) -> None:
    recipe = Recipe(optimizer="adamw")
    fabric_with(2, DDPStrategy()).launch(train_all, [recipe], str(tmp_path))
    (tmp_path / "second").mkdir()
    runs = fabric_with(size).launch(train_all, [recipe], str(tmp_path / "second"), str(tmp_path / "adamw-0"))
    assert runs is not None
    assert runs[0] is not None
    model, optimizer = make(recipe)
    train_plain(recipe, model, optimizer)
    expected = train_plain(recipe, model, optimizer)
    close((runs[0].losses, runs[0].weights), (expected.losses, dict(expected.weights)))
    close(runs[0].moments, expected.moments)
    again, its_optimizer = make(recipe)
    content = read_checkpoint(tmp_path / "second" / "adamw-0")
    again.load_state_dict(content["model"])
    its_optimizer.load_state_dict(content["optimizer"])
    close(train_plain(recipe, again, its_optimizer).losses, train_plain(recipe, model, optimizer).losses)


def prepare_many_ways(fabric: Fabric) -> None:
    """What `setup` does to the user's objects. Ranks start from different weights: rank 0's are taken."""
    recipe = Recipe(optimizer="adamw")
    net, optimizer = make(replace(recipe, seed=fabric.global_rank))
    expected, _ = make(replace(recipe, seed=0))
    names = [name for name, _ in net.named_parameters()]
    model = fabric.setup_module(net)
    assert model is net
    assert isinstance(model, Net)
    assert [name for name, _ in model.named_parameters()] == names == [n for n, _ in expected.named_parameters()]
    assert model.embed.weight is model.out.weight
    tokens, targets = batches(recipe)[0]
    close(model(tokens), expected(tokens))
    with torch.no_grad():
        close(model(tokens), expected(tokens))

    # Another method, once it is marked; and one backward of the sum of two forwards.
    model.mark_forward_method("loss")
    loss = model.loss(tokens, targets)
    fabric.backward(loss + model(tokens).square().mean())
    (expected.loss(tokens, targets) + expected(tokens).square().mean()).backward()
    close(whole_gradients(model), {name: p.grad for name, p in expected.named_parameters() if p.grad is not None})

    # Optimizers of a model that is set up, one with state that it had before its model was.
    later = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    later.step()
    other, optimizer = make(recipe)
    train_plain(recipe, other, optimizer)
    plain, its_optimizer = make(recipe)
    train_plain(recipe, plain, its_optimizer)
    tokens, targets = batches(recipe, fabric.global_rank, fabric.world_size)[0]
    other, optimizer = fabric.setup(other, optimizer)
    fabric.backward(nn.functional.cross_entropy(other(tokens), targets))
    plain.loss(*batches(recipe)[0]).backward()
    optimizer.step()
    its_optimizer.step()
    close(whole_state(fabric, other), plain.state_dict())
    # A part of a model is saved whole, too.
    close(whole_state(fabric, other.blocks[0]), plain.blocks[0].state_dict())


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def whole_state(fabric: Fabric, module: nn.Module) -> Any:
    """What rank 0 would save, on every rank."""
    return fabric.state_dict(module, all_ranks=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_references_to_module_and_optimizer_are_valid_after_sharding(size: int) -> None:
    fabric_with(size).launch(prepare_many_ways)


def accumulate_in_nested_contexts(fabric: Fabric) -> None:
    recipe = Recipe()
    model, _ = fabric.setup(*make(recipe))
    plain, _ = make(recipe)
    mine, whole = batches(recipe, fabric.global_rank, fabric.world_size), batches(recipe)

    def backward(index: int) -> None:
        fabric.backward(nn.functional.cross_entropy(model(mine[index][0]), mine[index][1]))
        plain.loss(*whole[index]).backward()

    with fabric.no_backward_sync(model):
        backward(0)
        with fabric.no_backward_sync(model):
            backward(1)
        with fabric.no_backward_sync(model, enabled=False):
            pass
        backward(2)
        with pytest.raises(RuntimeError, match="that `fully_shard` has not reduced over the ranks yet"):
            model.embed.weight.grad.norm()  # type: ignore[union-attr, operator]
    with fabric.no_backward_sync(model, enabled=False):
        backward(3)
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    close(whole_gradients(model), expected)


def train_two_models_with_one_backward(fabric: Fabric) -> None:
    recipes = Recipe(), Recipe(seed=1)
    first, second = (fabric.setup(*make(recipe)) for recipe in recipes)
    plain_first, plain_second = (make(recipe) for recipe in recipes)
    for step in range(3):
        tokens, _ = batches(recipes[0], fabric.global_rank, fabric.world_size)[step]
        fabric.backward((first[0](tokens) - second[0](tokens)).square().mean())
        tokens, _ = batches(recipes[0])[step]
        (plain_first[0](tokens) - plain_second[0](tokens)).square().mean().backward()
        for model, optimizer in (first, second):
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        for model, optimizer in (plain_first, plain_second):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    close(whole_state(fabric, first[0]), plain_first[0].state_dict())
    close(whole_state(fabric, second[0]), plain_second[0].state_dict())


def clip_what_is_not_finite(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*make(Recipe()))
    tokens, _ = batches(Recipe())[0]
    factor = float("inf") if fabric.global_rank == 1 else 1.0
    fabric.backward(model(tokens).sum() * factor)
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 is nan, so they cannot be clipped"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    assert norm is not None
    assert not norm.isfinite()


def compile_before_and_after(fabric: Fabric) -> None:
    tokens, _ = batches(Recipe())[0]
    plain, _ = make(Recipe())
    expected = plain(tokens)
    before, optimizer = make(Recipe())
    compiled = fabric.setup(torch.compile(before, backend="eager"), optimizer)[0]
    close(compiled(tokens), expected)
    after = torch.compile(fabric.setup_module(make(Recipe())[0]), backend="eager")
    close(after(tokens), expected)
    inside, _ = make(Recipe())
    for block in inside.blocks:
        block.compile(backend="eager")
    close(fabric.setup_module(inside)(tokens), expected)
    fabric.backward(compiled(tokens).sum())
    optimizer.step()
    plain(tokens).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.0).step()
    assert list(fabric.state_dict(before)) == (list(plain.state_dict()) if fabric.is_global_zero else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        accumulate_in_nested_contexts,
        train_two_models_with_one_backward,
        clip_what_is_not_finite,
        compile_before_and_after,
    ],
    ids=lambda body: body.__name__,
)
def test_every_rank_supports_it(body: Callable[[Fabric], None]) -> None:
    fabric_with(2).launch(body)


class Normalised(nn.Module):
    """With statistics, a dropped-in dtype check, and a block of its own to gather."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def train_in_half_precision(fabric: Fabric) -> tuple[torch.dtype, Any]:
    torch.manual_seed(0)
    model = Normalised()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    xs = fabric.to_device(torch.randn(3, 8, 4).chunk(fabric.world_size, dim=1)[fabric.global_rank])
    for x in xs:
        output = model(x)
        fabric.backward(output.square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    buffers = fabric.all_gather(dict(model.named_buffers()))
    for of_ranks in buffers.values():
        assert torch.equal(of_ranks, of_ranks[:1].expand_as(of_ranks))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters() if fabric.world_size > 1)
    return output.dtype, whole_state(fabric, model)


def state_in_half_precision(fabric: Fabric) -> tuple[torch.dtype, Any]:
    dtype, state = train_in_half_precision(fabric)
    return dtype, {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_with_batch_norm_is_that_of_ddp_and_outputs_are_float32(precision: str) -> None:
    word = Precision.parse(precision)  # type: ignore[arg-type]
    value = replace(word, init_scale=2.0**8)
    results = [
        Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, plugins=value, launcher="forkserver").launch(
            state_in_half_precision
        )
        for strategy in (FSDPStrategy(auto_wrap_policy=nn.Linear), DDPStrategy())
    ]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0][0] == results[1][0] == torch.float32
    torch.testing.assert_close(results[0][1], results[1][1], rtol=2e-2, atol=2e-2)


def overflow_on_one_rank(fabric: Fabric) -> None:
    recipe = Recipe(optimizer="adamw")
    model, optimizer = fabric.setup(*make(recipe))
    before = whole_state(fabric, model)
    tokens, targets = batches(recipe)[0]
    fabric.backward(nn.functional.cross_entropy(model(tokens).float(), targets))
    if fabric.global_rank == 1:
        local_part(model.out.weight.grad).fill_(float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    close(whole_state(fabric, model), before)
    assert not optimizer.state_dict()["state"]
    scales = fabric.all_gather(torch.tensor(fabric._connected.runtime.loss_scaler.num_skipped))  # type: ignore[union-attr]
    assert scales.tolist() == [1] * fabric.world_size


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipped")
def test_an_overflow_in_one_ranks_shard_skips_the_step_on_all() -> None:
    fabric_with(2, precision="16-mixed").launch(overflow_on_one_rank)


class WithoutReset(nn.Module):
    """A parameter that nothing but a checkpoint can fill."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


class WithTable(WithoutReset):
    """A buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def make_empty(fabric: Fabric, path: str) -> None:
    recipe = Recipe()
    plain, _ = make(recipe)
    tokens, _ = batches(recipe)[0]
    if fabric.is_global_zero:
        torch.save({"model": plain.state_dict()}, path)
    fabric.barrier()
    torch.manual_seed(fabric.global_rank)
    with fabric.init_module(empty_init=True):
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # An embedding that is tied is reset by both that share it, as in construction.
    model, optimizer = fabric.setup(net, optimizer)
    assert model.embed.weight is model.out.weight
    assert optimizer.param_groups[0]["params"][0] is model.embed.weight
    assert bool(model(tokens).isfinite().all())
    fabric.load(path, {"model": model})
    close(model(tokens), plain(tokens))

    with fabric.init_module(empty_init=True):
        net = WithoutReset()
    model = fabric.setup_module(net)
    with pytest.raises(
        RuntimeError, match=r"`WithoutReset` was made empty, and gain has no values yet. Load a checkpoint"
    ):
        model(torch.ones(1, 3, device=ACCELERATOR))
    fabric._connected.objects.state_access(model).write_module(model, WithoutReset().state_dict(), strict=True)
    assert bool(model(torch.ones(1, 3, device=ACCELERATOR)).isfinite().all())

    with fabric.init_module(empty_init=True):
        table = WithTable()
    with pytest.raises(RuntimeError, match=r"gain, table have no values yet.* or give the module .* `reset_param"):
        fabric.setup_module(table)(torch.ones(1, 3, device=ACCELERATOR))
    with fabric.init_module():
        assert not any(parameter.is_meta for parameter in Net().parameters())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_made_empty_is_filled_by_its_parts_or_by_a_checkpoint(size: int, tmp_path: Path) -> None:
    strategy = FSDPStrategy(auto_wrap_policy={Block, WithoutReset})
    fabric_with(size, strategy).launch(make_empty, str(tmp_path / "file"))


def refuse_at_setup(world: World) -> None:
    def setup(strategy: FSDPStrategy, module: nn.Module, move: bool = True, runtime: Runtime | None = None) -> None:
        strategy.setup(runtime or connected, module, [], move)

    connected = connect(world)
    with pytest.raises(
        ValueError,
        match=r"`auto_wrap_policy={Conv2d}` matches no submodule of the `Net`, which has the classes Block, Embedding",
    ):
        setup(FSDPStrategy(auto_wrap_policy={nn.Conv2d}), Net())
    with pytest.raises(ValueError, match=r"`auto_wrap_policy=refuse_at_setup.<locals>.<lambda>` matches no submodule"):
        setup(FSDPStrategy(auto_wrap_policy=lambda module: False), Net())
    with pytest.raises(TypeError, match=r"`auto_wrap_policy=\{'Block'\}` selects no submodules"):
        setup(FSDPStrategy(auto_wrap_policy={"Block"}), Net())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`auto_wrap_policy=3` selects no submodules. Pass classes"):
        setup(FSDPStrategy(auto_wrap_policy=3), Net())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
        setup(FSDPStrategy(auto_wrap_policy=nn.ModuleList), Net())
    with pytest.raises(
        ValueError, match=r"`embed.weight` and `out.weight` are one tied weight|`out.weight` and `embed.w"
    ):
        setup(FSDPStrategy(auto_wrap_policy=nn.Embedding), Net())
    setup(FSDPStrategy(), Net(), move=False)
    connected.collective.teardown()


def test_bad_options_are_errors_at_setup() -> None:
    run_world(1, refuse_at_setup)


@pytest.mark.parametrize(
    ("strategy", "accelerator", "num_devices", "num_nodes", "words"),
    [
        (FSDPStrategy(cpu_offload=True), CPUAccelerator(), 2, 1, "`cpu_offload=True` .* has them there already"),
        (FSDPStrategy(), TorchAccelerator("mps"), 1, 1, "has one device and no torch.distributed backend"),
        (
            FSDPStrategy(device_mesh=(2, 3)), CPUAccelerator(), 4, 1,
            r"`device_mesh=\(2, 3\)` makes a mesh of replicate=2 x shard=3: 6 ranks, but there are 4. Write whole",
        ),
        (FSDPStrategy(device_mesh=(-2, -2)), CPUAccelerator(), 4, 1, "from 1 on that multiply to 4"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_starts(
    strategy: FSDPStrategy, accelerator: Any, num_devices: int, num_nodes: int, words: str
) -> None:
    sentence = strategy.refuse(Target(accelerator=accelerator, num_devices=num_devices, num_nodes=num_nodes))
    with pytest.raises(ValueError, match=words):
        raise ValueError(sentence)


def test_hsdp_has_a_replica_on_each_node() -> None:
    strategy = FSDPStrategy(device_mesh="nodes")
    assert strategy.degrees(8, 2) == {"replicate": 2, "shard": 4}
    assert strategy.refuse(Target(accelerator=CPUAccelerator(), num_devices=4, num_nodes=2)) is None


def save_an_unknown_state(world: World) -> None:
    strategy = FSDPStrategy()
    runtime = connect(world, strategy)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"rows": torch.ones(4, 1)}
    with pytest.raises(
        ValueError, match=r"state 'rows' has shape \(4, 1\), and its parameter, which lies in shards, \(4, 4\)"
    ):
        strategy.setup(runtime, model, [optimizer], True)
    runtime.collective.teardown()


def test_optimizer_state_that_cannot_be_sharded_is_an_error() -> None:
    run_world(1, save_an_unknown_state)


def release_takes_off_what_is_ours(world: World) -> None:
    strategy = FSDPStrategy(auto_wrap_policy=Block)
    runtime = connect(world, strategy, "16-mixed")
    model, optimizer = make(Recipe())
    prepared = strategy.setup(runtime, model, [optimizer], True)
    model.mark_forward_method("loss")  # type: ignore[operator]
    prepared.release_optimizers()
    prepared.release()
    ours = [
        name for part in model.modules() for name in vars(part) if name in ("forward", "loss", "mark_forward_method")
    ]
    assert not ours
    assert not optimizer._optimizer_step_pre_hooks
    runtime.collective.teardown()


def test_release_removes_every_hook() -> None:
    run_world(1, release_takes_off_what_is_ours)
