"""Who a rank of mpirun or horovodrun is, and what their variables leave open: a table, without processes."""

from __future__ import annotations

import re

import pytest

from fabric.launchers import Rendezvous, World, detect_world

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-n1-1289@1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "17890",
}


def meeting(environ: dict[str, str]) -> Rendezvous:
    world = detect_world(environ)
    assert world is not None
    assert world.rendezvous is not None
    return world.rendezvous


def test_jobs_of_mpirun_have_ports_and_keys_of_their_own() -> None:
    one, other = meeting(OPEN_MPI), meeting({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-n1-1300@1"})
    assert (one.address, one.hosted) == ("127.0.0.1", False)
    assert one.port != other.port
    assert one.attempt != other.attempt
    assert 15_000 <= min(one.port, other.port) <= max(one.port, other.port) < 25_000


def test_the_users_port_and_address_count() -> None:
    rendezvous = meeting({**OPEN_MPI, "MASTER_PORT": "29500", "MASTER_ADDR": "n7"})
    assert (rendezvous.address, rendezvous.port) == ("n7", 29500)


def test_a_local_rank_that_is_not_the_rank_is_taken_as_it_is_on_one_node() -> None:
    world = detect_world({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"})
    assert world is not None
    assert (world.rank, world.local_rank, world.node_rank, world.num_nodes) == (1, 2, 0, 1)


def test_a_rank_of_hydra_is_detected_and_needs_a_port() -> None:
    assert detect_world({**HYDRA, "MASTER_PORT": "29500"}) == World(
        rank=1,
        size=2,
        local_rank=1,
        local_size=2,
        launcher="mpi",
        rendezvous=Rendezvous(address="127.0.0.1", port=29500, hosted=False, attempt=meeting_attempt("29500")),
    )
    words = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2: mpirun does not tell its ranks where they meet"
    with pytest.raises(ValueError, match=words) as raised:
        detect_world(HYDRA)
    assert "`MASTER_PORT` is not set. Pass both on, " in str(raised.value)
    assert "-genv MASTER_PORT 29500`" in str(raised.value)


def meeting_attempt(port: str) -> int:
    return meeting({**HYDRA, "MASTER_PORT": port}).attempt


def test_several_nodes_without_an_address_are_an_error_at_once() -> None:
    two_nodes = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match=re.escape("`mpirun -x MASTER_ADDR=HOST -x ")):
        detect_world(two_nodes)
    assert meeting({**two_nodes, "MASTER_ADDR": "n1"}).address == "n1"


@pytest.mark.parametrize(("local_rank", "local_size"), [("0", "2"), ("1", "3")], ids=["node by node", "unequal nodes"])
def test_ranks_without_a_node_are_an_error(local_rank: str, local_size: str) -> None:
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE": local_size}
    words = (
        rf"OMPI_COMM_WORLD_LOCAL_SIZE={local_size}: the node of this rank cannot be computed .* `mpirun --map-by slot`"
    )
    with pytest.raises(ValueError, match=words):
        detect_world({**environ, "MASTER_ADDR": "n1"})


def test_a_job_of_one_rank_connects_to_no_other() -> None:
    alone = {name: "1" if name.endswith("SIZE") else "0" for name in OPEN_MPI if name.startswith("OMPI")}
    world = detect_world(alone)
    assert world is not None
    assert (world.size, world.rendezvous) == (1, None)


def test_mpirun_within_a_job_of_slurm_is_mpirun() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    world = detect_world({**slurm, **OPEN_MPI})
    assert world is not None
    assert (world.launcher, world.rank, world.size) == ("mpi", 1, 4)


def test_a_rank_of_horovodrun_uses_the_rendezvous_of_its_job() -> None:
    one, other = meeting(HOROVODRUN), meeting({**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "17891"})
    assert (one.address, one.hosted) == ("127.0.0.1", False)
    assert one.port != other.port
    assert one.attempt != other.attempt


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"HOROVOD_SIZE": "3"}, r"HOROVOD_SIZE=3 .*: nodes have different numbers of ranks.* same number of slots"),
        (
            {"HOROVOD_SIZE": "4", "HOROVOD_CROSS_SIZE": "2"},
            r"started ranks on 2 nodes, .* Write `MASTER_ADDR=HOST horovodrun \.\.\.`",
        ),
    ],
    ids=["unequal nodes", "no address"],
)
def test_an_incomplete_environment_of_horovodrun_is_an_error_at_once(changed: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        detect_world({**HOROVODRUN, **changed})
