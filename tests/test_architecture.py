"""The shape of the code, held: who imports whom, who reads the environment, what a public name owes its reader."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("fabric", "strategies", "launchers")
"""From the top. A layer may import those after it."""
PARTS = ("accelerators", "checkpoint", "collectives", "data", "precision")
"""Of `strategies/`: each may import its own folder, `tensors` and `FOR_ALL`."""
FOR_ALL = (
    "fabric.launchers.world",
    "fabric.launchers.private_names",
    "fabric.strategies.step_hooks",
    "fabric.strategies.undo",
)

COMPOSED = ("gradients", "module", "sharding", "optimizers")
"""Of `strategies/`, from the bottom: these compose parts, and know no technique. Each may import those before it."""
TECHNIQUES = ("ddp", "deepspeed", "fairscale", "fsdp", "horovod", "manual", "model_parallel", "xla")
"""Of `strategies/`: a folder each, and none imports another."""

# What breaks a rule, and why it may. An entry that is not needed any more fails a test.
PART_IMPORTS = {
    ("strategies/data/loaders.py", "fabric.launchers.process.os_process"): "counted once",
    ("strategies/checkpoint/errors.py", "fabric.strategies.collectives.collective"): "the role, no member of it",
    (
        "strategies/checkpoint/read_and_verify.py",
        "fabric.strategies.collectives.collective",
    ): "the role, no member of it",
    (
        "strategies/checkpoint/write_and_commit.py",
        "fabric.strategies.collectives.collective",
    ): "the role, no member of it",
    ("strategies/checkpoint/tensors.py", "fabric.strategies.collectives.collective"): "the role, no member of it",
    ("strategies/checkpoint/other_formats.py", "fabric.strategies.collectives.collective"): "the role, no member of it",
    (
        "strategies/checkpoint/write_and_commit.py",
        "fabric.strategies.accelerators.torch_accelerator",
    ): "which have streams",
    ("strategies/data/transfer.py", "fabric.strategies.accelerators.torch_accelerator"): "which have streams",
    (
        "strategies/accelerators/accelerator_registry.py",
        "fabric.strategies.registered_names",
    ): "one way to register names, for all",
    ("strategies/accelerators/xla.py", "fabric.launchers.environments.xla"): "PJRT's devices are what variables say",
    ("strategies/accelerators/xla.py", "fabric.launchers.xla_internals"): "the one list of torch_xla's private names",
    (
        "strategies/collectives/process_group.py",
        "fabric.launchers.rendezvous.join",
    ): "goes where the launcher said to meet",
    (
        "strategies/collectives/process_group.py",
        "fabric.launchers.process.network",
    ): "gloo takes its interface from a variable",
    (
        "strategies/collectives/process_group.py",
        "fabric.launchers.environments.defaults",
    ): "gloo's option for one group is a variable",
    (
        "strategies/collectives/process_group.py",
        "fabric.launchers.watch.table",
    ): "the name by which a group is known",
    (
        "strategies/collectives/torch_calls_check.py",
        "fabric.launchers.watch.table",
    ): "the name by which a group is known",
    (
        "strategies/collectives/flight_recorder.py",
        "fabric.launchers.watch.table",
    ): "a call in words, as the watcher takes it",
    ("strategies/collectives/fabric_calls_check.py", "fabric.launchers.process.stack"): "the user's line in a stack",
    ("strategies/collectives/flight_recorder.py", "fabric.launchers.process.stack"): "the user's line in a stack",
}
COLLECTIVES_OUTSIDE = {
    "strategies/deepspeed/library.py": "hands torch's renamed functions to DeepSpeed, which looks for the old names",
}
ENVIRONMENT = {
    "fabric/fabric.py": "the one place that hands the environment to Request and Machine",
    "fabric/lightning/utilities/rank_zero.py": "Lightning Fabric's decorator asks for the rank wherever it is called",
    "fabric/testing/equality.py": "hands the environment of a test to the program that it verifies",
    "launchers/rank/task.py": "a rank's environment is that of the process that launched it, and its place",
    "launchers/rank/rank.py": "a process becomes a rank",
    "strategies/collectives/process_group.py": "gloo's option for one group is a variable",
    "strategies/deepspeed/library.py": "takes back what DeepSpeed writes",
}

PATCHED = {
    # While a module of DeepSpeed is imported, which would compile functions: two seconds on every rank.
    "strategies/deepspeed/library.py": ["compiler.compile", "compiler.compile"]
}
SETTINGS = ("sys.", "torch.backends.")
"""Where Python and torch document assignments."""

COLLECTIVE = re.compile(
    r"(all_gather|all_reduce|all_to_all|barrier|broadcast|gather|irecv|isend|monitored_barrier|recv|reduce|"
    r"reduce_scatter|scatter|send)(_\w+)?"
)
"""torch.distributed's functions that talk to other ranks."""


def sources() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, the module first."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports anywhere in it, `from` among them."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{named(path)}:{node.lineno} imports relatively"
            found.add(node.module)
    return found


def layer_of(module: str) -> str | None:
    if module.split(".")[0] != "fabric":
        return None
    inner = module.split(".")[1:2]
    return inner[0] if inner and inner[0] in LAYERS else "fabric"


def environment_uses(path: Path) -> list[int]:
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    return [
        node.lineno
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]


def collective_uses(path: Path) -> set[str]:
    """Collectives of torch.distributed that the file names."""
    modules, found = set(), set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "torch.distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found |= {alias.name for alias in node.names if COLLECTIVE.fullmatch(alias.name)}
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {*modules, "torch.distributed"}:
            found |= {node.attr} if COLLECTIVE.fullmatch(node.attr) else set()
    return found


def test_imports_point_one_way() -> None:
    wrong = [
        f"{named(path)} imports {module}"
        for path in sources()
        for module in imports_of(path)
        if (layer := layer_of(module)) is not None
        and LAYERS.index(layer) < LAYERS.index(path.relative_to(ROOT).parts[0])
    ]
    assert not wrong


LAUNCHERS = ("environments", "process", "rendezvous", "rank", "watch", "supervision")
"""Folders of `launchers/`, from the bottom. A folder may import those before it, and `LOWEST`."""
LOWEST = ("world", "launcher", "private_names")
"""Files of `launchers/`: roles and values. All others are above the folders."""


def test_the_folders_of_launchers_import_one_way() -> None:
    order = [*LOWEST, *LAUNCHERS]
    wrong = [
        f"{named(path)} imports {module}"
        for path in (ROOT / "launchers").rglob("*.py")
        for module in imports_of(path)
        if module.startswith("fabric.launchers.")
        and (level := path.relative_to(ROOT / "launchers").with_suffix("").parts[0]) in order
        and (level != (target := module.split(".")[2]))
        and (target not in order or order.index(target) > order.index(level))
    ]
    assert not wrong


def test_what_composes_parts_imports_one_way() -> None:
    wrong = [
        f"{named(path)} imports {module}"
        for number, folder in enumerate(COMPOSED)
        for path in (ROOT / "strategies" / folder).rglob("*.py")
        for module in imports_of(path)
        if module.startswith(tuple(f"fabric.strategies.{above}." for above in COMPOSED[number + 1 :]))
    ]
    assert not wrong


def folder_of(parts: tuple[str, ...]) -> str:
    """The folder of a module by its path in the repository; a file directly in a layer counts as a folder."""
    top = ROOT / parts[0] / (parts[1] if len(parts) > 1 else "__init__")
    return "/".join(parts[:2]) if top.is_dir() else f"{parts[0]}/{top.name}.py"


def test_no_folders_import_each_other_in_a_circle() -> None:
    imported: dict[str, set[str]] = {}
    for path in sources():
        folder = folder_of(path.relative_to(ROOT).with_suffix("").parts)
        for module in imports_of(path) - TYPES_ALONE.get(named(path), set()):
            if (layer := layer_of(module)) is not None:
                inner = module.split(".")[1 if layer == "fabric" else 2 :]
                imported.setdefault(folder, set()).add(folder_of((layer, *inner)))
    graph = {folder: others - {folder} for folder, others in imported.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


TYPES_ALONE = {"fabric/checkpoints/directory.py": {"fabric.fabric"}}
"""Imports for annotations alone, of what a caller passes."""


def test_the_core_knows_nothing_of_the_package_for_code_of_lightning_fabric() -> None:
    wrong = [
        f"{named(path)} imports {module}"
        for path in sources()
        for module in imports_of(path)
        if module.startswith("fabric.lightning") and not named(path).startswith("fabric/lightning/")
    ]
    assert not wrong


def part_imports() -> set[tuple[str, str]]:
    """What files of a part import beyond their part."""
    return {
        (named(path), module)
        for part in PARTS
        for path in (ROOT / "strategies" / part).rglob("*.py")
        for module in imports_of(path)
        if layer_of(module) is not None
        and module not in FOR_ALL
        and not f"{module}.".startswith((f"fabric.strategies.{part}.", "fabric.strategies.tensors."))
    }


def test_a_part_imports_no_other_part_and_no_strategy() -> None:
    assert part_imports() == set(PART_IMPORTS)


def test_tensors_are_the_ground_floor() -> None:
    wrong = [
        f"{named(path)} imports {module}"
        for path in (ROOT / "strategies/tensors").rglob("*.py")
        for module in imports_of(path)
        if layer_of(module) is not None and not module.startswith("fabric.strategies.tensors.")
    ]
    assert not wrong


def test_every_folder_of_strategies_is_a_part_or_a_technique() -> None:
    folders = {path.parent.relative_to(ROOT / "strategies").parts[0] for path in (ROOT / "strategies").rglob("*/*.py")}
    assert folders == {"tensors", *PARTS, *COMPOSED, *TECHNIQUES}


def test_tests_are_in_the_same_folders_as_their_sources() -> None:
    folders = {path.parent for layer in LAYERS for path in (ROOT / "tests" / layer).rglob("*.py")}
    assert not [named(folder) for folder in folders if not (ROOT / folder.relative_to(ROOT / "tests")).is_dir()]


def test_no_technique_is_imported_except_by_itself_and_the_registries() -> None:
    wrong = [
        f"{named(path)} imports {module}"
        for path in (ROOT / "strategies").rglob("*.py")
        for module in imports_of(path)
        if module.startswith("fabric.strategies.")
        and (technique := module.split(".")[2]) in TECHNIQUES
        and technique != path.relative_to(ROOT / "strategies").parts[0]
        and path != ROOT / "strategies/__init__.py"
    ]
    assert not wrong


def test_nothing_in_the_package_imports_the_command_line() -> None:
    wrong = [
        f"{named(path)} imports {module}"
        for path in sources()
        if path.parent != ROOT / "fabric/cli" and path != ROOT / "fabric/__main__.py"
        for module in imports_of(path)
        if f"{module}.".startswith("fabric.cli.")
    ]
    assert not wrong


def test_only_the_collectives_talk_to_other_ranks() -> None:
    outside = {named(path): collective_uses(path) for path in sources() if path.parent.name != "collectives"}
    assert {name for name, uses in outside.items() if uses} == set(COLLECTIVES_OUTSIDE)


def test_the_environment_is_read_where_a_process_or_a_command_begins() -> None:
    elsewhere = {named(path) for path in sources() if path.parent.name not in ("environments", "cli")}
    assert {name for name in elsewhere if environment_uses(ROOT / name)} == set(ENVIRONMENT)


LOOKING = re.compile(r"(os\.environ|find_spec|import_module|num_devices|version|why_unavailable|which|PJRT\.of)\b")


def takes_a_target(node: ast.AST) -> bool:
    arguments = node.args.args if isinstance(node, ast.FunctionDef) else []
    return any(one.annotation is not None and ast.unparse(one.annotation) == "Target" for one in arguments)


def test_resolving_reads_only_its_arguments() -> None:
    """`tests/fabric/configure/test_resolve.py` gives it machines that are not this one."""
    files = [ROOT / "fabric/configure" / name for name in ("devices.py", "resolve.py")]
    code = [(path, node) for path in files for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
    code += [(path, node) for path in sources() for node in nodes_of(path) if takes_a_target(node)]
    assert len(code) > 30
    wrong = [
        f"{named(path)}:{inner.lineno}: {ast.unparse(inner)}"
        for path, node in code
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
        or (isinstance(inner, ast.Call) and re.search(rf"(^|\.){LOOKING.pattern}$", ast.unparse(inner.func)))
        or (isinstance(inner, ast.Attribute) and ast.unparse(inner) == "os.environ")
    ]
    assert not wrong


def test_the_layer_of_the_user_never_asks_which_strategy_it_has() -> None:
    wrong = [
        f"{named(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in sources()
        if named(path).startswith("fabric/")
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("isinstance", "issubclass")
        and re.search(r"\w+Strategy\b", ast.unparse(node.args[1]))
    ]
    assert not wrong


def replaced_in(path: Path) -> list[str]:
    """Assignments to attributes of other packages' modules and classes, and to classes of objects."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in nodes_of(path)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and layer_of(node.module or "") is None)
        for alias in node.names
    }
    targets = [
        target
        for node in nodes_of(path)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete)
        for target in (node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target])
    ]
    targets += [
        node
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__")
    ]
    found = []
    for target in targets:
        attribute = target.args[0] if isinstance(target, ast.Call) else target
        root: ast.AST = attribute
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        is_attribute = isinstance(target, ast.Call) or isinstance(attribute, ast.Attribute)
        is_of_a_package = isinstance(root, ast.Name) and root.id in imported and is_attribute
        if is_of_a_package or (isinstance(attribute, ast.Attribute) and attribute.attr in ("__class__", "__code__")):
            found.append(ast.unparse(target))
    return [words for words in found if not words.startswith(SETTINGS)]


def test_nothing_of_another_package_is_patched_and_no_object_changes_its_class() -> None:
    assert {named(path): found for path in sources() if (found := replaced_in(path))} == PATCHED


def test_prepared_is_made_in_one_place() -> None:
    makers = {
        named(path)
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Prepared"
    }
    assert makers == {"strategies/prepared.py"}


NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    """The lines of a file that are not blank, a comment or a docstring."""
    docstrings = {
        number
        for node in nodes_of(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    with path.open("rb") as file:
        tokens = [each for each in tokenize.tokenize(file.readline) if each.type not in NO_CODE]
    return len({number for each in tokens for number in range(each.start[0], each.end[0] + 1)} - docstrings)


def test_files_and_functions_are_small() -> None:
    """A file has at most 600 code lines, a function at most 8 parameters unless users call it; an eighth is imports."""
    sizes = {named(path): code_lines(path) for path in sources()}
    assert not {name: size for name, size in sizes.items() if size > 600}
    of_users = {"Fabric.__init__", "DeepSpeedStrategy.__init__", "FSDPStrategy.__init__", "token_batches"}
    num_imports = 0
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                num_imports += (node.end_lineno or node.lineno) - node.lineno + 1
            owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for function in ast.iter_child_nodes(node):
                if isinstance(function, ast.FunctionDef) and owner + function.name not in of_users:
                    given = function.args
                    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                    assert len({*names} - {"self", "cls"}) <= 8, f"{named(path)}: {owner}{function.name}"
    assert num_imports / sum(sizes.values()) < 0.125


def test_no_file_has_a_generic_name() -> None:
    drawers = {"utils", "util", "common", "helpers", "misc", "base"}
    assert not [named(path) for path in sources() if drawers & set(path.relative_to(ROOT).with_suffix("").parts)]


def test_everything_public_has_a_docstring() -> None:
    missing = []
    for path in sources():
        tree = nodes_of(path)[0]
        assert isinstance(tree, ast.Module)
        if tree.body and not ast.get_docstring(tree):
            missing.append(named(path))
        missing += [f"{named(path)}: {name}" for name in undocumented(tree)]
    assert not missing


def undocumented(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef) or child.name.startswith("_"):
            continue
        if not ast.get_docstring(child) and not is_setter_or_overload(child):
            yield child.name
        if isinstance(child, ast.ClassDef) and not is_described_elsewhere(child):
            yield from (f"{child.name}.{name}" for name in undocumented(child))


def is_setter_or_overload(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith((".setter", "overload")) for one in node.decorator_list)


def is_described_elsewhere(node: ast.ClassDef) -> bool:
    """The methods of a final class with a base are described there; those of a protocol are somebody else's."""
    bases = {ast.unparse(base).split("[")[0] for base in node.bases}
    return "Protocol" in bases or (bool(bases) and "final" in map(ast.unparse, node.decorator_list))


def modules_after(program: str, *, before: str = "") -> set[str]:
    """The modules that `program` imports, in a new process that runs `before` first."""
    program = (
        f"import sys\n{before}\nloaded = {{*sys.modules}}\n{program}\nprint(*{{*sys.modules}} - loaded, sep='\\n')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    return set(ended.stdout.splitlines())


@pytest.mark.slow
def test_importing_fabric_adds_only_cheap_modules_to_those_of_torch() -> None:
    added = modules_after("import fabric; fabric.Fabric", before="import torch")
    others = {name for name in added if name.split(".")[0] != "fabric"}
    assert len(others) <= 12, f"besides its own, `import fabric` adds {sorted(others)}"
    assert not {name for name in others if name.split(".")[0] in ("torch", "rich", "tensorboard", "sklearn")}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]], ids=" ".join)
def test_the_help_of_the_command_line_imports_no_torch(words: list[str]) -> None:
    loaded = modules_after(
        "import contextlib, io\nfrom fabric.cli import main\n"
        f"sys.argv = {['fabric', *words]!r}\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main()"
    )
    assert "fabric.cli" in loaded
    assert "torch" not in loaded


SINCE_PYTHON_3_11 = {
    "typing": "Self Never LiteralString Required NotRequired TypeVarTuple Unpack assert_never assert_type override",
    "enum": "StrEnum verify member nonmember",
    "contextlib": "chdir",
    "asyncio": "TaskGroup timeout Runner",
    "datetime": "UTC",
}
"""What Python 3.10, the oldest that the package is for, lacks; mypy reads the standard library of 3.11."""


def test_nothing_that_python_3_10_lacks_is_imported() -> None:
    found = [
        f"{named(path)}:{node.lineno} {alias.name}"
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in SINCE_PYTHON_3_11.get(node.module or "", "").split()
    ]
    assert not found
