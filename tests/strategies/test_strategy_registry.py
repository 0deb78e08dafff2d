"""Strategies by name. What changes the table for good, or needs another set of packages, runs in its own process."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import template

from fabric.strategies import DDPStrategy, Strategy, available_strategies, register_strategy
from fabric.strategies.strategy_registry import make_strategy, strategy_registrations


def run(code: str, path: Path | None = None, *, fresh: bool = False) -> str:
    """What a program prints, with `path` among its packages. `fresh`: it has imported nothing before."""
    head = f"import sys; sys.path.append({str(path)!r})\n" if path is not None else ""
    done = template.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=100, fresh=fresh)
    return done.stdout + done.stderr


def install(path: Path, distribution: str, entry_points: str, module: str = "") -> None:
    """A package as pip would leave it: metadata, and a module."""
    metadata = path / f"{distribution}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    (path / f"{distribution}.py").write_text(module)


OWN = """
from fabric.strategies import DDPStrategy
def make(): return DDPStrategy(static_graph=True)
"""


@pytest.mark.parametrize("name", available_strategies())
def test_every_name_makes_a_strategy(name: str) -> None:
    assert isinstance(make_strategy(name), Strategy)
    assert strategy_registrations()[name].description


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("ddp", DDPStrategy()),
        ("ddp_spawn", DDPStrategy(launcher="spawn")),
        ("ddp_fork", DDPStrategy(launcher="fork")),
        ("ddp_notebook", DDPStrategy(launcher="fork")),
        ("ddp_find_unused_parameters_true", DDPStrategy(find_unused_parameters=True)),
    ],
)
def test_a_name_is_a_strategy_with_options(name: str, strategy: Strategy) -> None:
    assert make_strategy(name) == strategy


def test_an_unknown_name_is_an_error_with_near_and_all_names() -> None:
    with pytest.raises(ValueError, match=r"`strategy='ddp_forks'` is not known. Did you mean 'ddp_fork'\? ") as raised:
        make_strategy("ddp_forks")
    for name in available_strategies():
        assert repr(name) in str(raised.value)


@pytest.mark.parametrize("name", ["ddp", "auto"])
def test_a_name_that_is_taken_cannot_be_registered(name: str) -> None:
    with pytest.raises(ValueError, match=f"`register_strategy\\('{name}', ...\\)`: the name is taken. Choose another"):
        register_strategy(name, DDPStrategy)


@pytest.mark.slow
def test_a_registered_name_is_as_good_as_ours_and_cannot_be_taken_again() -> None:
    output = run("""
from fabric.strategies import DDPStrategy, available_strategies, register_strategy
from fabric.strategies.strategy_registry import make_strategy, strategy_registrations
make = lambda: DDPStrategy(static_graph=True)
register_strategy("mine", make, description="as I like it")
assert make_strategy("mine") == make()
assert available_strategies()[-1] == "mine"
assert strategy_registrations()["mine"].description == "as I like it"
register_strategy("mine", make)
""")
    assert "`register_strategy('mine', ...)`: the name is taken" in output


@pytest.mark.slow
def test_an_installed_package_adds_a_strategy_that_is_imported_when_it_is_made(tmp_path: Path) -> None:
    install(tmp_path, "faraway", "[fabric.strategies]\nfar = faraway:make\n", OWN)
    output = run(
        """
import sys
from fabric.strategies import available_strategies
from fabric.strategies.strategy_registry import make_strategy, strategy_registrations
assert available_strategies()[-1] == "far"
assert strategy_registrations()["far"].description == "from faraway"
assert "faraway" not in sys.modules
print(make_strategy("far").static_graph)
""",
        tmp_path,
    )
    assert output == "True\n"


@pytest.mark.slow
def test_an_installed_package_cannot_take_a_name_of_ours(tmp_path: Path) -> None:
    install(tmp_path, "faraway", "[fabric.strategies]\nddp = faraway:make\n", OWN)
    output = run(
        'from fabric.strategies.strategy_registry import strategy_registrations as known; print(known()["ddp"].source)',
        tmp_path,
    )
    assert output == "torchfabric\n"


@pytest.mark.slow
def test_an_installed_package_adds_an_accelerator(tmp_path: Path) -> None:
    module = (
        "from fabric.strategies.accelerators import TorchAccelerator\ndef make(): return TorchAccelerator('maia')\n"
    )
    install(tmp_path, "faraway", "[fabric.accelerators]\nmaia = faraway:make\n", module)
    output = run(
        """
from fabric.configure.machine import Machine
from fabric.configure.request import Request
from fabric.strategies.accelerators import accelerators
assert accelerators()[-1].name == "maia"
print(Machine.look({}, Request(accelerator="maia")).of("maia").num_devices)
""",
        tmp_path,
    )
    assert output == "0\n"


@pytest.mark.slow
def test_reading_the_names_imports_no_strategy() -> None:
    output = run(
        """
import sys
from fabric.strategies import available_strategies
available_strategies()
print([name for name in ("torch", "fabric.strategies.ddp.strategy") if name in sys.modules])
""",
        fresh=True,
    )
    assert output == "[]\n"


OURS = {type(one.make()) for one in strategy_registrations().values() if one.source == "torchfabric"}


@pytest.mark.parametrize("kind", sorted(OURS, key=str))
def test_each_option_of_a_strategy_is_explained_in_its_help(kind: type[Any]) -> None:
    arguments = (inspect.getdoc(kind) or "").partition("\nArgs:\n")[2]
    explained = re.findall(r"^    (\w+): \S+ \S+", arguments, re.MULTILINE)
    assert sorted(explained) == sorted(field.name for field in dataclasses.fields(kind))
