"""What every cluster environment holds: it knows its own ranks, and no others, and says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import RECORDED, Recorded

from fabric.launchers import detect_world
from fabric.launchers.environments import ENVIRONMENTS, Environment

EVERY = pytest.mark.parametrize("recorded", RECORDED, ids=repr)


@pytest.fixture
def environ(recorded: Recorded, tmp_path: Path) -> dict[str, str]:
    """The variables, with the files that they name."""
    named = {}
    for name, content in (recorded.files or {}).items():
        (tmp_path / name).write_text(content)
        named[name] = str(tmp_path / name)
    return {**recorded.environ, **named}


def environment_of(recorded: Recorded) -> Environment:
    """A rank of ours bears the name of its launcher instead of the environment's."""
    name = "fabric" if "FABRIC_LAUNCHER" in recorded.environ else recorded.launcher
    return next(environment for environment in ENVIRONMENTS if environment.name == name)


def test_every_environment_has_been_recorded() -> None:
    assert [environment_of(recorded) for recorded in RECORDED] == list(ENVIRONMENTS)


@EVERY
def test_the_world_has_the_rank_its_sizes_and_the_rendezvous(recorded: Recorded, environ: dict[str, str]) -> None:
    assert environment_of(recorded).world(environ) == recorded.world


@EVERY
def test_the_first_environment_that_detects_itself_is_the_right_one(
    recorded: Recorded, environ: dict[str, str]
) -> None:
    assert detect_world(environ) == recorded.world


@EVERY
def test_the_variables_of_other_launchers_are_not_taken_for_its_own(recorded: Recorded) -> None:
    environment = environment_of(recorded)
    takes = {other.launcher for other in RECORDED if environment.detect(other.environ)}
    plain = {other.launcher for other in RECORDED if "RANK" in other.environ}
    assert takes == (plain if recorded.launcher == "local" else {recorded.launcher})


@EVERY
def test_an_empty_environment_is_detected_by_none(recorded: Recorded) -> None:
    assert not environment_of(recorded).detect({})


@EVERY
def test_each_missing_variable_is_an_error_that_names_it(recorded: Recorded, environ: dict[str, str]) -> None:
    for name in recorded.needed:
        rest = {other: value for other, value in environ.items() if other != name}
        with pytest.raises(ValueError, match=name):
            environment_of(recorded).world(rest)


@EVERY
def test_a_rank_outside_the_world_is_an_error_that_shows_the_variable(
    recorded: Recorded, environ: dict[str, str]
) -> None:
    for beyond in ("4", "-1"):
        with pytest.raises(ValueError, match=f"{recorded.rank}={beyond}"):
            environment_of(recorded).world({**environ, recorded.rank: beyond})


@EVERY
def test_a_rank_that_is_not_a_number_is_an_error_that_shows_it(recorded: Recorded, environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"`{recorded.rank}=two` is not a whole number"):
        environment_of(recorded).world({**environ, recorded.rank: "two"})


@pytest.mark.parametrize("inner", ["script", "torchelastic", "mpi", "slurm"])
def test_a_launcher_inside_a_slurm_job_is_detected_before_slurm(inner: str) -> None:
    recorded = {one.launcher: one for one in RECORDED}
    assert detect_world({**recorded["slurm"].environ, **recorded[inner].environ}) == recorded[inner].world


@pytest.mark.parametrize("inner", ["script", "torchelastic", "mpi", "horovod", "local"])
def test_a_launcher_inside_a_pod_is_not_taken_for_kubeflow(inner: str) -> None:
    (recorded,) = (one for one in RECORDED if one.launcher == inner)
    assert detect_world({"KUBERNETES_SERVICE_HOST": "10.96.0.1", **recorded.environ}) == recorded.world
