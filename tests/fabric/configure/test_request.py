"""Each word of a request alone, and the words of `fabric run` beside those of the script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fabric.configure.request import Request
from fabric.configure.run_options import ProgramId, as_variable
from fabric.launchers.environments.environment import Environment
from fabric.launchers.environments.local import LocalEnvironment
from fabric.launchers.environments.slurm import SlurmEnvironment
from fabric.launchers.environments.torchelastic import variables_of
from fabric.launchers.world import Rendezvous, World
from fabric.strategies import DDPStrategy, Precision
from fabric.strategies.accelerators import CPUAccelerator


def build(environ: Mapping[str, str] | None = None, **arguments: Any) -> Request:
    return Request.build(arguments, environ or {})


def typed(**words: str) -> dict[str, str]:
    """The environment of a script that `fabric run` started with these words."""
    return as_variable(words, ProgramId.current())


def test_a_request_of_nothing_is_the_default_request() -> None:
    assert build() == Request()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("auto", "auto"),
        (-1, "all"),
        ("-1", "all"),
        (2, 2),
        ("2", 2),
        ("0,1", (0, 1)),
        ("3,", (3,)),
        ([0, 1], (0, 1)),
        ((2, 0), (2, 0)),
        (" 1, 2", (1, 2)),
    ],
)
def test_every_form_of_devices_is_read(written: object, read: object) -> None:
    assert build(devices=written).devices == read


@pytest.mark.parametrize(
    ("argument", "value", "error", "words"),
    [
        ("devices", True, ValueError, "`devices=True` names no devices. Write 'auto', -1 for all, a number such as 2"),
        ("devices", 1.5, ValueError, "`devices=1.5` names no devices."),
        ("devices", None, ValueError, "`devices=None` names no devices."),
        ("devices", 0, ValueError, "`devices=0` names no devices."),
        ("devices", -2, ValueError, "`devices=-2` names no devices."),
        ("devices", "two", ValueError, "`devices='two'` names no devices."),
        ("devices", "0,a", ValueError, "`devices='0,a'` names no devices."),
        ("devices", "0", ValueError, "`devices='0'` names no devices."),
        ("devices", [], ValueError, "`devices=[]` names no devices."),
        ("devices", [0, 0], ValueError, "`devices=[0, 0]` names no devices."),
        ("devices", "1,2,1", ValueError, "or different indices, such as '0,1' or [0, 1]."),
        ("devices", [0, -1], ValueError, "`devices=[0, -1]` names no devices."),
        ("devices", [0, True], ValueError, "`devices=[0, True]` names no devices."),
        ("devices", [0, "1"], ValueError, "`devices=[0, '1']` names no devices."),
        ("num_nodes", 0, ValueError, "`num_nodes=0` is out of range. Write a whole number from 1."),
        ("num_nodes", True, ValueError, "`num_nodes=True` is out of range. Write a whole number from 1."),
        ("num_nodes", "two", ValueError, "`num_nodes='two'` is out of range."),
        ("precision", "fp8", ValueError, "`precision='fp8'` names no precision."),
        (
            "launcher",
            "torchrun",
            ValueError,
            "`launcher='torchrun'` is not known. Write one of 'auto', ",
        ),
        ("launcher", "inline", ValueError, "`launcher='inline'` is not known."),
        ("deterministic", "yes", ValueError, "`deterministic='yes'` is not known. Write one of True, False, 'warn'."),
        ("strategy", "", ValueError, "`strategy=''` is not a name. Write one, or leave it out."),
        ("strategy", DDPStrategy, TypeError, "is neither a name nor an instance of `Strategy`. Pass one of them."),
        ("strategy", 3, TypeError, "`strategy=3` is neither a name nor an instance of `Strategy`."),
        ("accelerator", CPUAccelerator, TypeError, "nor an instance of `Accelerator`. Pass one of them."),
        ("plugins", ["bf16"], TypeError, "`plugins` holds 'bf16', a `str`. Pass a `Precision`, an `Environment` or"),
        ("plugins", 7, TypeError, "`plugins` holds 7, a `int`. Pass a `Precision`, an `Environment` or a `Check`; "),
    ],
)
def test_an_invalid_word_raises_with_what_to_write(
    argument: str, value: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        build(**{argument: value})
    assert words in str(raised.value)


def test_one_callback_is_as_good_as_a_list_of_one() -> None:
    callback = object()
    assert build(callbacks=callback).callbacks == build(callbacks=[callback]).callbacks == (callback,)
    assert build(callbacks=None, loggers=None).callbacks == ()


def test_a_precision_may_come_as_a_plugin() -> None:
    assert build(plugins=Precision.parse("bf16")).precision == Precision.parse("bf16-mixed")
    assert build(plugins=[Precision.parse("bf16")], precision="bf16").precision == Precision.parse("bf16-mixed")


def test_two_different_precisions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`precision='16-true'` and the plugin 'bf16-mixed' both set the precision. Pass one"
    ):
        build(plugins=[Precision.parse("bf16")], precision="16-true")


def test_two_plugins_of_one_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`plugins` holds two of the same kind: .*Local.* and .*Slurm.*. Pass one."):
        build(plugins=[LocalEnvironment(), SlurmEnvironment()])


def test_an_environment_may_come_as_a_plugin() -> None:
    own: Environment = SlurmEnvironment()
    assert build(plugins=[own]).environment is own


def test_the_command_line_sets_options_that_the_script_leaves_at_the_default() -> None:
    environ = typed(
        accelerator="cpu",
        strategy="ddp",
        devices="0,1",
        num_nodes="2",
        node_rank="1",
        main_address="host",
        main_port="29500",
        precision="bf16",
        launcher="spawn",
    )
    assert build(environ, devices="auto", precision="32-true") == Request(
        accelerator="cpu",
        strategy="ddp",
        devices=(0, 1),
        num_nodes=2,
        node_rank=1,
        main_address="host",
        main_port=29500,
        precision=Precision.parse("bf16-mixed"),
        launcher="spawn",
    )


def test_the_same_value_in_script_and_command_line_is_accepted() -> None:
    assert build(typed(devices="2", precision="bf16"), devices=2, precision="bf16-mixed").devices == 2


def test_auto_on_the_command_line_keeps_the_value_of_the_script() -> None:
    assert build(typed(devices="auto"), devices=2).devices == 2


@pytest.mark.parametrize(
    ("argument", "mine", "word", "words"),
    [
        (
            "devices",
            2,
            "3",
            "The script says `Fabric(devices=2)` and the command line `--devices 3`. Leave one of them out.",
        ),
        ("num_nodes", 2, "1", "`Fabric(num_nodes=2)` and the command line `--num-nodes 1`"),
        ("precision", "bf16", "16-true", "`Fabric(precision='bf16-mixed')` and the command line `--precision 16-true`"),
        ("strategy", "ddp_fork", "ddp", "`Fabric(strategy='ddp_fork')` and the command line `--strategy ddp`"),
        ("launcher", "fork", "spawn", "`Fabric(launcher='fork')` and the command line `--launcher spawn`"),
    ],
)
def test_different_values_in_script_and_command_line_raise(argument: str, mine: object, word: str, words: str) -> None:
    with pytest.raises(ValueError, match="Leave one of them out") as raised:
        build(typed(**{argument: word}), **{argument: mine})
    assert words in str(raised.value)


def test_options_for_another_program_are_ignored() -> None:
    other = ProgramId(arguments=("other.py",), main="/elsewhere/other.py")
    assert build(as_variable({"devices": "3"}, other)) == Request()


def test_options_of_the_ranks_do_not_apply_to_a_world_of_one_inside_a_rank() -> None:
    two = World(size=2, local_size=2, rendezvous=Rendezvous(address="127.0.0.1", port=1, hosted=True), launcher="fork")
    words = typed(devices="2", strategy="ddp", precision="bf16-true")
    within = {**words, **variables_of(two, {}, 2)}
    assert build(within, devices=1) == Request(devices=1, precision=Precision.parse("bf16-true"))
    assert build(within).devices == 2
    with pytest.raises(ValueError, match=r"`Fabric\(devices=1\)` and the command line `--devices 2`"):
        build(words, devices=1)
