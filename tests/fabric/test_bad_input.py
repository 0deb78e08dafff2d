"""What cannot be honoured is an error at the line that wrote it, with what to write instead, before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import template
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from fabric import Fabric
from fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ManualStrategy,
    ModelParallelStrategy,
    Strategy,
)
from fabric.strategies.fairscale.fsdp import FairScaleFSDPStrategy

Row: TypeAlias = tuple[Callable[[], Any], type[Exception], str]


def two(strategy: str | Strategy, **options: Any) -> Fabric:
    return Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, **options)


CONSTRUCTORS: dict[str, Row] = {
    # Options that strategies share
    "launcher": (lambda: two(DDPStrategy(launcher="thread")), ValueError, "Write one of 'auto', 'script', 'fork'"),
    "sanitize, a number": (
        lambda: Fabric(accelerator=ACCELERATOR, devices=1, sanitize=0),
        ValueError,
        "`sanitize=0` is out of range. Write a whole number from 1.",
    ),
    "sanitize": (
        lambda: two("ddp", sanitize=True),
        ValueError,
        "`sanitize=True` is not known. Write 'start', 'always', a number of steps, or False.",
    ),
    "log_dir": (lambda: two("ddp", log_dir=3), TypeError, "expected str, bytes or os.PathLike object, not int"),
    "prefix_output": (lambda: two("ddp", prefix_output="no"), ValueError, "is not known. Write one of True, False."),
    "timeout": (lambda: two(DDPStrategy(timeout_seconds=-1)), ValueError, "write a number of seconds above 0."),
    "timeout word": (
        lambda: two(FSDPStrategy(timeout_seconds="5")),  # type: ignore[arg-type]
        TypeError,
        "`FSDPStrategy(timeout_seconds='5')` is a `str`. Write a number.",
    ),
    "bytes": (lambda: two(DDPStrategy(bucket_bytes=0)), ValueError, "write a number of bytes from 1 on."),
    "truth": (
        lambda: two(DDPStrategy(shard_optimizer="yes")),  # type: ignore[arg-type]
        TypeError,
        "`DDPStrategy(shard_optimizer='yes')` is a `str`. Write True or False.",
    ),
    "number": (
        lambda: two(DeepSpeedStrategy(stage=True)),
        TypeError,
        "`DeepSpeedStrategy(stage=True)` is a `bool`. Write a whole number, or None.",
    ),
    # Meshes
    "mesh of FSDP": (lambda: two(FSDPStrategy(device_mesh=(2, 2))), ValueError, "replicate=2 x shard=2: 4 ranks, but"),
    "mesh of one": (lambda: two(FSDPStrategy(device_mesh=(2,))), ValueError, "write two whole numbers"),  # type: ignore[arg-type]
    "mesh that is a word": (lambda: two(FSDPStrategy(device_mesh="node")), ValueError, "'nodes', or None"),  # type: ignore[arg-type]
    "mesh of a model": (
        lambda: two(ModelParallelStrategy(parallelize_fn=print, data=2, tensor=2)),
        ValueError,
        "data=2 x shard=1 x context=1 x tensor=2: 4 ranks, but there are 2",
    ),
    "mesh by hand": (
        lambda: two(ManualStrategy(parallelize=print, mesh={"a": 2, "b": 2})),  # type: ignore[arg-type, return-value]
        ValueError,
        "makes a mesh of a=2 x b=2: 4 ranks, but there are 2",
    ),
    # Policies
    "policy of a word": (
        lambda: FSDPStrategy(auto_wrap_policy="Block"),  # type: ignore[arg-type]
        TypeError,
        "`auto_wrap_policy='Block'` selects no submodules. Pass classes of modules",
    ),
    "policy of words": (
        lambda: two(FSDPStrategy(activation_checkpointing_policy={"Block"})),  # type: ignore[arg-type]
        TypeError,
        "`activation_checkpointing_policy={'Block'}` selects no submodules. Pass classes of modules",
    ),
    "policy of a module": (
        lambda: FSDPStrategy(auto_wrap_policy=nn.Linear(2, 2)),
        TypeError,
        "`auto_wrap_policy=Linear(in_features=2, out_features=2, bias=True)` selects no submodules. Pass classes",
    ),
    # Functions
    "number that lays out": (
        lambda: ModelParallelStrategy(parallelize_fn=3),  # type: ignore[arg-type]
        TypeError,
        "`ModelParallelStrategy(parallelize_fn=3)` is a `int`, not a function. Pass one, `parallelize_fn(model, me",
    ),
    "list that lays out": (
        lambda: ModelParallelStrategy(parallelize_fn=[print]),  # type: ignore[arg-type]
        TypeError,
        "is a `list`, not a function. Pass one, `parallelize_fn(model, mesh)`.",
    ),
    "word that lays out": (
        lambda: ManualStrategy(parallelize="fsdp"),  # type: ignore[arg-type]
        TypeError,
        "`ManualStrategy(parallelize='fsdp')` is a `str`, not a function. Pass one, `parallelize(module, context)`.",
    ),
    "module that lays out": (
        lambda: ManualStrategy(parallelize=nn.Linear(2, 2)),
        TypeError,
        "is a `Linear`, not a function. Pass one, `parallelize(module, context)`.",
    ),
    "policy of a number": (
        lambda: FairScaleFSDPStrategy(wrap=3),
        TypeError,
        "`wrap=3` selects no submodules. Pass classes of",
    ),  # type: ignore[arg-type]
    "number that travels": (
        lambda: DDPStrategy(comm_hook=3),  # type: ignore[arg-type]
        TypeError,
        "`comm_hook=3` is a `int`. Write 'bf16', 'fp16', `PowerSGD(...)`, or a function `(state, bucket)`",
    ),
    # DeepSpeed
    "key": (
        lambda: DeepSpeedStrategy(config={"zero_optimisation": {}}),
        ValueError,
        "Did you mean 'zero_optimization'?",
    ),
    "key within": (
        lambda: DeepSpeedStrategy(config={"zero_optimization": {"stages": 2}}),
        ValueError,
        "`stages` in `zero_optimization` in `DeepSpeedStrategy(config=...)` is not a key",
    ),
    "stage": (lambda: DeepSpeedStrategy(stage=4), ValueError, "ZeRO has the stages 1, 2 and 3, not 4."),
    # Precisions
    "double under ZeRO": (lambda: two("deepspeed", precision="64-true"), ValueError, "Write one of '32-true'"),
    "float16 under ZeRO": (lambda: two("deepspeed", precision="16-true"), ValueError, "has no float16 there"),
    "double in slices": (
        lambda: two("ddp_fully_sharded", precision="64-true"),
        ValueError,
        "keeps them in torch.float32 or torch.float16. Pass `precision='32-true'`",
    ),
    "no precision": (lambda: two("ddp", precision="8-bit"), ValueError, "`precision='8-bit'` names no precision."),
    "tpu": (lambda: Fabric(accelerator="tpu"), ValueError, "Write 'xla'."),
    # Strategies
    "no strategy": (lambda: two("fdsp"), ValueError, "Did you mean 'fsdp'?"),
    "a class": (lambda: two(DDPStrategy), TypeError, "is neither a name nor an instance of `Strategy`."),  # type: ignore[arg-type]
    "no function": (lambda: two("manual"), ValueError, "`strategy=ManualStrategy(parallelize=function)`"),
    "no function for a mesh": (lambda: two("model_parallel"), ValueError, "ModelParallelStrategy(parallelize_fn="),
    "nothing to offload": (lambda: two("fsdp_cpu_offload"), ValueError, "Pass `strategy='fsdp'`"),
    "two devices for one": (lambda: two("single_device"), ValueError, "Pass `devices=1`, or `strategy='ddp'`"),
    "too early": (lambda: two("ddp").setup(nn.Linear(2, 2)), RuntimeError, "Call `fabric.launch()` once"),
}


def check(row: Row) -> None:
    call, kind, words = row
    with pytest.raises(kind) as raised:
        call()
    assert words in str(raised.value)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_wrong_arguments_raise_before_anything_starts(name: str) -> None:
    check(CONSTRUCTORS[name])


@pytest.fixture(scope="module")
def alone() -> Iterator[Fabric]:
    with Fabric(accelerator=ACCELERATOR, devices=1, strategy="single_device") as fabric:
        yield fabric


def net() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(2, 2)
    return model, SGD(model.parameters(), lr=0.1)


METHODS: dict[str, tuple[Callable[[Fabric, Path], Any], type[Exception], str]] = {
    "a word": (lambda f, _: f.setup("net"), TypeError, "A `str` was passed as the module."),  # type: ignore[arg-type]
    "swapped": (lambda f, _: f.setup(*reversed(net())), TypeError, "A `SGD` was passed as the module."),  # type: ignore[arg-type]
    "two modules": (lambda f, _: f.setup(*net(), *net()), TypeError, "A `Linear` was passed as an optim"),  # type: ignore[arg-type]
    "a list": (lambda f, _: f.setup(net()[0], [net()[1]]), TypeError, "Write `fabric.setup(module, optimizer, ..."),  # type: ignore[arg-type]
    "a scheduler": (
        lambda f, _: f.setup(net()[0], StepLR(net()[1], 1)),  # type: ignore[arg-type]
        TypeError,
        "A `StepLR` was passed as an optimizer. Write `fabric.setup(module, optimizer, ..., scheduler=",
    ),
    "no optimizer": (lambda f, _: f.setup_optimizers("adam"), TypeError, "A `str` was passed as an opt"),  # type: ignore[arg-type]
    "twice": (lambda f, _: [f.setup(one) for one in [net()[0]] * 2], ValueError, "Set each module and optimizer up"),
    "use": (
        lambda f, _: f.setup_dataloaders([1], use="eval"),  # type: ignore[arg-type]
        ValueError,
        "`setup_dataloaders(use='eval')`: write one of 'train', 'validate', 'test', 'predict'",
    ),
    "a dataset": (
        lambda f, _: f.setup_dataloaders(torch.utils.data.TensorDataset(torch.ones(3))),
        TypeError,
        "`setup_dataloaders` was given a `TensorDataset`, which cannot be iterated.",
    ),
    "a class": (lambda f, _: f.setup(nn.Linear), TypeError, "The class `Linear`, not an instance, was passed"),  # type: ignore[call-overload]
    "an optimizer of another model": (
        lambda f, _: f.setup(net()[0], net()[1]),
        ValueError,
        "holds no parameter of the",
    ),
    "a list of loaders": (
        lambda f, _: f.setup_dataloaders([torch.utils.data.DataLoader([1])] * 2),  # type: ignore[arg-type]
        TypeError,
        "`train, test = fabric.setup_dataloaders(train, test)`",
    ),
    "loaders by name": (lambda f, _: f.setup_dataloaders({"train": [1]}), TypeError, "given a `dict` as one loader"),
    "clip by nothing": (lambda f, _: f.clip_gradients(*f.setup(*net())), ValueError, "pass exactly one of the two"),
    "clip below 0": (
        lambda f, _: f.clip_gradients(*f.setup(*net()), max_norm=-1.0),
        ValueError,
        "`clip_gradients(clip_val=None, max_norm=-1.0)`: a negative limit would flip the sign of gradients.",
    ),
    "clip by NaN": (lambda f, _: f.clip_gradients(*f.setup(*net()), clip_val=float("nan")), ValueError, "from 0 on"),
    "save a module": (
        lambda f, path: f.save(path, net()[0]),  # type: ignore[arg-type]
        TypeError,
        "`fabric.save(path, ...)` was given a `Linear`. Give it a name: `{'model': model}`.",
    ),
    "load into a module": (lambda f, path: f.load(path, net()[0]), TypeError, "`load_raw` reads a file that holds"),  # type: ignore[arg-type]
    "reduction": (
        lambda f, _: f.all_reduce(torch.ones(2), reduce_op="avg"),  # type: ignore[arg-type]
        ValueError,
        "`'avg'` is not a reduction. Write one of 'sum', 'mean'",
    ),
    "reduction as the group": (
        lambda f, _: f.all_reduce(torch.ones(2), "sum"),  # type: ignore[arg-type]
        TypeError,
        "`group='sum'`: a group is what `fabric.collective.split(ranks)` returns",
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_names_the_wrong_argument_in_its_error(name: str, alone: Fabric, tmp_path: Path) -> None:
    call, kind, words = METHODS[name]
    check((lambda: call(alone, tmp_path / "file"), kind, words))
    assert not list(tmp_path.iterdir())


def sentence(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def foreign_optimizer(fabric: Fabric) -> tuple[str, str, bool]:
    """An optimizer of a copy of the model: it would step parameters that nobody uses. The model stays as it was."""
    model, optimizer = net()
    _, of_another = net()
    message = sentence(fabric.setup, model, of_another)
    plain = "forward" not in vars(model) and type(model.weight) is nn.Parameter
    return message, sentence(fabric.setup, model, optimizer), plain


def no_such_part(fabric: Fabric) -> tuple[str, str, bool]:
    """A policy that matches nothing. The model stays as it was."""
    model, optimizer = net()
    message = sentence(fabric.setup, model, optimizer)
    plain = "forward" not in vars(model) and type(model.weight) is nn.Parameter
    return message, "no error", plain


def compiled(fabric: Fabric) -> tuple[str, str, bool]:
    model, optimizer = net()
    model, optimizer = fabric.setup(model, optimizer)
    message = sentence(torch.compile(model, backend="eager"), torch.ones(1, 2))
    return message, sentence(model, torch.ones(1, 2)), True


ON_RANKS: dict[str, tuple[Strategy, Callable[[Fabric], tuple[str, str, bool]], str]] = {
    "ZeRO-3, an optimizer of other parameters": (
        DeepSpeedStrategy(stage=3),
        foreign_optimizer,
        "ValueError: `fabric.setup(module, optimizer)`: the `SGD` holds no parameter of the `Linear`, and of no module",
    ),
    "fsdp, a policy of another model": (
        FSDPStrategy(auto_wrap_policy={nn.Conv2d}),
        no_such_part,
        "ValueError: `auto_wrap_policy={Conv2d}` matches no submodule of the `Linear`, which has the classes Linear.",
    ),
    "fully sharded, a policy of another model": (
        FairScaleFSDPStrategy(wrap=nn.Conv2d),
        no_such_part,
        "ValueError: `wrap=Conv2d` matches no submodule of the `Linear`, which has the classes Linear.",
    ),
    "fully sharded, compiled": (
        FairScaleFSDPStrategy(),
        compiled,
        "RuntimeError: `torch.compile` under `strategy='ddp_fully_sharded'`: FairScale gathers parameters in code",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_setup_that_raises_leaves_the_model_unchanged(name: str) -> None:
    strategy, body, words = ON_RANKS[name]
    found = two(strategy, launcher="forkserver").launch(body)
    assert found is not None
    message, afterwards, plain = found
    assert words in message
    assert afterwards == "no error"
    assert plain


WITHOUT = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {"fairscale", "deepspeed", "tensorboard", "torch_xla", "horovod"}


class Without:
    "What finds packages on disk, on a disk that lacks some."

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(context):
        return () if context.name in HIDDEN else PathFinder.find_distributions(context)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from fabric import Fabric
from fabric.strategies import DeepSpeedStrategy, FairScaleFSDPStrategy, FairScaleShardedStrategy

for strategy in sys.argv[1:]:
    try:
        Fabric(accelerator="cpu", devices=2, strategy=strategy)
    except ValueError as error:
        print(strategy, error, sep="|")
    else:
        print(strategy, "no error", sep="|")
"""

EXTRAS = {
    "ddp_sharded": "`pip install 'torchfabric[fairscale]'`",
    "ddp_fully_sharded": "`pip install 'torchfabric[fairscale]'`",
    "deepspeed": "`pip install 'torchfabric[deepspeed]'`",
    "deepspeed_stage_3_offload": "`pip install 'torchfabric[deepspeed]'`",
    "xla": "`pip install 'torchfabric[xla]'`",
    "horovod": "needs Horovod, which cannot be imported here",
}


@pytest.mark.slow
def test_a_missing_package_raises_with_the_command_that_installs_it(tmp_path: Path) -> None:
    program = tmp_path / "without.py"
    program.write_text(WITHOUT)
    command = [sys.executable, str(program), *EXTRAS, "ddp"]
    done = template.run(command, capture_output=True, text=True, timeout=100, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    message = dict(line.split("|", 1) for line in done.stdout.splitlines())
    assert message.pop("ddp") == "no error"
    assert {name: words in message[name] for name, words in EXTRAS.items()} == dict.fromkeys(EXTRAS, True), message
