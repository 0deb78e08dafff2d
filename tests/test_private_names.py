"""Each private name of another library that a source file uses is in a list, with a reason, and exists."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import template

from fabric.launchers.private_names import TESTED_TORCH, Names, require

ROOT = Path(__file__).parents[1]
LISTS = {
    "launchers.process.interpreter": ("NAMES", "OF_LOADERS"),
    "launchers.xla_internals": ("NAMES",),
    "strategies.torch_internals": ("BOUND", "FULLY_SHARD", "COMPILED"),
    "strategies.data.huggingface": ("NAMES",),
    "strategies.deepspeed.library": ("NAMES", "STAGE_3"),
    "strategies.deepspeed.released": ("COPY_ON_WRITE",),
    "strategies.fairscale.library": ("FULLY_SHARDED", "SHARDED"),
}
"""Where the lists are, and what they are called."""
STABLE: Names = {
    "torch": {
        "_C": "holds functions of other lists",
        "_disable_dynamo": "`torch.compiler.disable` imports the compiler, 1 s; used instead where this is gone",
        "_foreach_mul_": "one kernel for many gradients, as optimizers of torch use",
        "_foreach_norm": "the same for norms; `get_total_norm` rounds those of half precision to it",
    },
    "torch._C": {
        "_dispatch_get_all_op_names": "which collectives the sanitizer does not know, to say so",
    },
    "torch.distributed.distributed_c10d": {"_world": "all groups: see Note [Groups while forked processes run]"},
    "torch._C._distributed_c10d": {"_dump_fr_trace|_dump_nccl_trace": "reads the flight recorder in this process"},
    "torch:Tensor": {
        "_version": "whether a tensor was written to; PyTorch's documentation names it, and offers nothing else",
        "_backward_hooks _post_accumulate_grad_hooks": "whether a parameter that is replaced by a shard has hooks",
        "_base": "whether a saved tensor is a view of a parameter",
        "_is_view": "whether a gradient shares memory with another",
        "_make_wrapper_subclass _make_subclass": "how torch's own subclasses of Tensor are made",
    },
    "torch.nn:Module": {
        "_load_state_dict_pre_hooks _load_from_state_dict": "whether a part of a module converts what it loads",
        "_buffers _parameters _modules": "read per forward, where `named_buffers` is slower and leaves out shared ones",
        "_metadata": "the versions of modules, which `state_dict` attaches to its result",
        "_non_persistent_buffers_set": "which buffers are in no state dict",
        "_forward_pre_hooks _forward_hooks": "a copied module must not run the hooks of the original",
        "_apply": "casts parameters in place; `Module.to` takes no function",
    },
    "torch.nn.modules.batchnorm": {"_BatchNorm": "the class that all kinds of BatchNorm have in common"},
    "torch.optim:Optimizer": {
        "profile_hook_step": "runs the hooks of an optimizer around a `step` of ours",
    },
    "torch.utils._pytree": {"tree_flatten tree_unflatten": "containers that somebody registered with torch"},
    "torch.utils._python_dispatch": {"TorchDispatchMode": "sees each operation within a block; documented, not public"},
    "torch.utils.data:DataLoader": {
        "_iterator _IterableDataset_len_called": "a copy of a loader takes over no iterator and no workers"
    },
}
"""Of torch, not checked at run time: its documentation, pickles of modules, or subclasses everywhere rely on them."""
PUBLIC = {
    "os._exit",
    "sys._current_frames",
    "sys._getframe",
    "_thread",
    "_asdict",
    "_make",
    "_fields",
    "_is_in_bad_fork",
}
"""Python documents these, and torch the last one, for modules of devices (`torch.utils.rename_privateuse1_backend`)."""
OF_USERS = {
    "_fabric _fabric_optimizers": "a LightningModule's, which Lightning Fabric sets as well",
    "_no_split_modules": "the classes of its blocks, as a model of transformers names them",
    "_opt_called _wrapped_by_lr_sched": "marks that schedulers of torch look for on an optimizer",
    "_shuffle": "the name of webdataset's function for shuffling, which a pipeline shows",
    "_world_size _rank _parallel_rank_world": "how samplers of other packages name what they split by",
    "_checkpoint_wrapped_module": "a prefix in names of parameters, which torch's wrapper for checkpointing leaves",
    "_reset_parameters": "the method of `nn.MultiheadAttention` and `nn.Transformer` that draws their weights",
    "_local_scalar_dense _foreach_zero_": "operators, as a TorchDispatchMode is told them",
    "_foreach_copy_ _foreach_maximum_ _foreach_minimum_": "operators that optimizers of other libraries call",
    "_schema": "of an operator: whether it writes to its arguments",
}
"""Attributes of what a user brings, looked for there and nowhere relied upon, with the reason."""


def sources() -> list[Path]:
    return sorted(path for layer in ("fabric", "strategies", "launchers") for path in (ROOT / layer).rglob("*.py"))


def lists() -> dict[str, Names]:
    """Each list, read without importing its file: torch_xla is not installed everywhere."""
    found = {}
    for module, names in LISTS.items():
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names:
                assert node.value is not None
                found[f"{module}.{node.target.id}"] = ast.literal_eval(node.value)
    assert len(found) == sum(map(len, LISTS.values()))
    return {**found, "STABLE": STABLE}


def listed() -> set[str]:
    return {
        name
        for table in lists().values()
        for reasons in table.values()
        for several in reasons
        for name in re.split(r"[ |]", several)
    }


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """All of the sources, without the lists themselves and without what is imported for types alone."""
    found = []
    for path in sources():
        waiting: list[ast.AST] = [ast.parse(path.read_text())]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Names":
                continue
            found.append((path, node))
            waiting += ast.iter_child_nodes(node)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def looked_up(node: ast.Call | ast.Subscript) -> Iterator[str]:
    """The name within `getattr(x, "name")`, `vars(x)["name"]` and `vars(x).get("name")`."""
    called = ast.unparse(node.func if isinstance(node, ast.Call) else node.value)
    if re.search(r"^(get|set|has|del)attr$|(\bvars\(.*\)|__dict__)(\.\w+)?$", called):
        constants = node.args if isinstance(node, ast.Call) else [node.slice]
        yield from (each.value for each in constants if isinstance(each, ast.Constant) and isinstance(each.value, str))


def own_names() -> set[str]:
    """Private names that a class of ours, or a module of ours, defines."""
    found = set()
    for _, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def uses() -> dict[str, set[str]]:
    """Names that stand for something of another library, and the files that use them."""
    found: dict[str, set[str]] = {}
    ours = own_names()
    for path, node in nodes():
        names: list[str] = []
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            names = [] if ast.unparse(node) in PUBLIC else [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if not modules or modules[0].split(".")[0] != "fabric":
                names = [part for each in [*modules, *(one.name for one in node.names)] for part in each.split(".")]
        elif isinstance(node, ast.Call | ast.Subscript):
            names = list(looked_up(node))
        for name in names:
            if is_private(name) and name not in ours | PUBLIC:
                found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_every_private_name_that_a_source_file_uses_is_in_a_list() -> None:
    of_users = {name for several in OF_USERS for name in several.split()}
    modules = {"_internal", "_distributed_c10d", "_dynamo", "_utils", "_pytree", "_python_dispatch"}  # of listed owners
    unknown = {name: files for name, files in uses().items() if name not in listed() | of_users | modules}
    assert not unknown, "add them to the list of their library, or use what is public"


def test_no_list_names_what_no_source_file_uses() -> None:
    counts = Counter(word for path in sources() for word in re.findall(r"\w+", path.read_text()))
    here = Counter(re.findall(r"\w+", str(STABLE)))
    assert not {name for name in listed() if counts[name] + here[name] < 2}


@pytest.mark.slow
def test_the_installed_releases_have_each_name_of_the_lists() -> None:
    tables = {name: table for name, table in lists().items() if find_spec(next(iter(table)).partition(".")[0])}
    program = (  # in another process: importing DeepSpeed changes the environment
        "from fabric.launchers.private_names import require\n"
        f"for name, table in {tables!r}.items(): require(name, 'an earlier release', table)"
    )
    ended = template.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


WITHOUT = """
import os, re, torch, torch._dynamo, torch.distributed.fsdp
from contextlib import ExitStack, contextmanager
from inspect import isfunction, unwrap
from pkgutil import resolve_name

def renamed(code, name):
    there = lambda each: "renamed" if each == name else renamed(each, name) if hasattr(each, "co_names") else each
    return code.replace(co_names=tuple(map(there, code.co_names)), co_consts=tuple(map(there, code.co_consts)))

@contextmanager
def without(owner, name):  # of a class, most names are attributes that its own functions set, or call
    owner, absent = resolve_name(owner), object()
    before = vars(owner).get(name, absent)
    functions = [unwrap(each) for each in vars(owner).values() if isfunction(each)] if isinstance(owner, type) else []
    codes = [(each, each.__code__) for each in functions if isfunction(each)]
    for each, code in codes:
        each.__code__ = renamed(code, name)
    if before is not absent:
        delattr(owner, name)
    yield
    if before is not absent:
        setattr(owner, name, before)
    for each, code in codes:
        each.__code__ = code

def step(fabric):
    model = torch.nn.Linear(3, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return fabric.world_size

def fully_shard():  # as the setup of a model in shards does
    from fabric.strategies.torch_internals import require_fully_shard
    require_fully_shard()

def compile():  # as the first call of a compiled forward does
    from fabric.strategies.torch_internals import require_compiler
    require_compiler()

def copy_on_write():  # as the setup at ZeRO stage 3 does
    from fabric.strategies.torch_internals import require_copy_on_write
    require_copy_on_write()

def bound():
    from fabric.strategies.torch_internals import after_backward

USES = {"BOUND": bound, "FULLY_SHARD": fully_shard, "COMPILED": compile, "COPY_ON_WRITE": copy_on_write}

def say(feature, owner, either):
    try:
        USES[feature]()
        print("nothing is said without", owner, either)
    except ImportError as error:
        assert f"has no `{owner.replace(':', '.')}.{either}`, a private name" in str(error), error
        print("said:", either, flush=True)

if __name__ == "__main__":
    names = [
        (feature, owner, either)
        for feature, table in TABLES.items()
        for owner, reasons in table.items()
        for several in reasons
        for either in several.split()
    ]
    for feature, owner, either in names:
        if feature in USES and not set(either.split("|")) & NEEDED:
            pid = os.fork()
            if pid == 0:
                with ExitStack() as hidden:
                    for name in either.split("|"):
                        hidden.enter_context(without(owner, name))
                    say(feature, owner, either)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    with ExitStack() as hidden:
        for feature, owner, either in names:
            for name in set(either.split("|")) - NEEDED:
                if feature != "STABLE" or name in vars(resolve_name(owner)):
                    hidden.enter_context(without(owner, name))
        from fabric import Fabric
        for strategy, size in (("single_device", 1), ("ddp", 2)):
            launcher = "fork" if size > 1 else "auto"
            assert Fabric(accelerator="cpu", strategy=strategy, devices=size, launcher=launcher).launch(step) == size
"""
NEEDED = {
    *("_C", "_disable_dynamo", "_apply", "_load_from_state_dict", "profile_hook_step", "_execution_engine"),
    *("_world", "_orig_mod", "_foreach_norm"),
    *("TorchDispatchMode", "tree_flatten", "tree_unflatten", "_BatchNorm"),
}
"""Names without which torch itself could not import its compiler or do a step, and classes and functions that packages
everywhere import."""


@pytest.mark.slow
def test_each_private_name_of_torch_that_is_missing_is_said_by_its_feature_and_single_device_and_ddp_need_none(
    tmp_path: Path,
) -> None:
    tables = {name.rpartition(".")[2]: table for name, table in lists().items() if "torch_internals" in name}
    program = tmp_path / "program.py"
    program.write_text(f"TABLES, NEEDED = { {**tables, 'STABLE': STABLE}!r}, {NEEDED!r}\n{WITHOUT}")
    ended = template.run([sys.executable, str(program)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    names = {each for table in tables.values() for reasons in table.values() for each in " ".join(reasons).split()}
    assert sorted(ended.stdout.splitlines()) == sorted(f"said: {name}" for name in names - NEEDED), ended.stderr


def test_a_missing_name_is_an_error_that_names_both_releases() -> None:
    missing: Mapping[str, Mapping[str, str]] = {"torch.nn:Module": {"_buffers _never_was": "to be missed"}}
    with pytest.raises(
        ImportError,
        match=r"torch 2\.\d+\.\d+\S* has no `torch\.nn\.Module\._never_was`, a private name that torchfabric relies "
        r"on: to be missed\. torchfabric was tested with torch 2\.9 to 2\.14: install one of those, or a newer"
        r" torchfabric",
    ):
        require("torch", TESTED_TORCH, missing)
