"""Who a process is, out of the variables that a launcher left: a table, without processes."""

from __future__ import annotations

import pytest

from fabric.launchers import Rendezvous, World, detect_world
from fabric.launchers.environments.slurm import SlurmEnvironment, first_host

HAND = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
TORCHRUN = {
    **HAND,
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_NAME": "train",
}


def test_without_variables_there_is_no_world() -> None:
    assert detect_world({}) is None


def test_ranks_set_by_hand_are_on_one_node_unless_variables_say_otherwise() -> None:
    assert detect_world(HAND) == World(
        rank=3,
        size=4,
        local_rank=3,
        local_size=4,
        launcher="local",
        rendezvous=Rendezvous(address="node0", port=29500, hosted=False),
    )


def test_ranks_set_by_hand_on_two_nodes() -> None:
    world = detect_world({**HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert world is not None
    assert (world.local_rank, world.node_rank, world.num_nodes) == (1, 1, 2)


def test_a_rank_of_torchrun_uses_the_store_of_its_agent_and_has_its_attempt() -> None:
    assert detect_world(TORCHRUN) == World(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        node_rank=1,
        num_nodes=2,
        launcher="torchelastic",
        rendezvous=Rendezvous(address="node0", port=29500, hosted=True, attempt=2),
    )


def test_torchrun_inside_a_slurm_job_is_torchrun() -> None:
    world = detect_world({**SRUN, **TORCHRUN})
    assert world is not None
    assert world.launcher == "torchelastic"


def test_a_task_of_srun_on_uneven_nodes() -> None:
    world = detect_world(SRUN)
    assert world is not None
    assert world.rendezvous is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (4, 5, 0, 1)
    assert (world.node_rank, world.num_nodes, world.launcher) == (2, 3, "slurm")
    assert (world.rendezvous.address, world.rendezvous.hosted) == ("gpu07", False)


def test_the_steps_of_two_jobs_have_different_ports() -> None:
    ports = set()
    for job in ("71", "72"):
        world = detect_world({**SRUN, "SLURM_JOB_ID": job})
        assert world is not None
        assert world.rendezvous is not None
        ports.add(world.rendezvous.port)
    assert len(ports) == 2


@pytest.mark.parametrize(
    "environ",
    [
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "40203"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},
        {**SRUN, "OMPI_COMM_WORLD_RANK": "1"},
        {**SRUN, "MPI_LOCALRANKID": "1"},
    ],
    ids=["sbatch", "srun --pty bash", "salloc with use_interactive_step", "mpirun", "mpiexec.hydra"],
)
def test_a_shell_inside_a_slurm_job_is_not_a_rank_of_srun(environ: dict[str, str]) -> None:
    assert not SlurmEnvironment().detect(environ)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_ranks_of_srun_are_ranks_whatever_the_name_of_the_job(name: str) -> None:
    """`srun bash train.sh` is called bash; srun within `salloc` is called interactive."""
    assert SlurmEnvironment().detect({**SRUN, "SLURM_JOB_NAME": name})


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a1", "a1"),
        ("b2,a1", "b2"),
        ("a[3-5,9],b", "a3"),
        ("gpu[001-010]", "gpu001"),
        ("n[1-2]-ib[0-1]", "n1-ib0"),
        ("n[09-11],n7", "n09"),
    ],
)
def test_the_first_of_a_list_of_hosts(text: str, first: str) -> None:
    assert first_host(text) == first


UNSET = "Set it on every rank; or, if no launch by hand is meant, `unset"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, f"A launch by hand sets `WORLD_SIZE`, but it is not set here. {UNSET} RANK`."),
        (
            {"RANK": "", "WORLD_SIZE": ""},
            f"sets `RANK`, but it is empty here. {UNSET} RANK WORLD_SIZE`",
        ),
        (
            {"WORLD_SIZE": "1"},
            f"A launch by hand sets `RANK`, but it is not set here. {UNSET} WORLD_SIZE`",
        ),
        ({**HAND, "RANK": "4"}, "MASTER_PORT=29500: these contradict each other. A world with `rank=4` and `size=4`"),
        ({**HAND, "RANK": "two"}, "`RANK=two` is not a whole number"),
        ({**HAND, "LOCAL_RANK": "1"}, "LOCAL_RANK and LOCAL_WORLD_SIZE go together"),
        ({**HAND, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "A world with `local_rank=2` and `local_size=2`"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "sets `MASTER_ADDR`, but it is not set here. Set it on every rank"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "`LOCAL_RANK=x` is not a whole number. torchrun sets it"),
        (
            {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"},
            "torchrun sets `LOCAL_WORLD_SIZE`, but it is not set here",
        ),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "adds up to 4 ranks on 2 nodes, not to 5 on 3"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, "two adds up to 0 ranks on 0 nodes, not to 5 on 3"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.96.0.1", **HAND, "PET_NPROC_PER_NODE": "4"},
            "Kubeflow wrote this for torchrun, but the pod's command runs Python itself",
        ),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "2"}, "Write `torchrun` in the place of `python`"),
        ({**SRUN, "SLURM_PROCID": "5"}, "these contradict each other. A world with `rank=5` and `size=5`"),
    ],
)
def test_incomplete_or_contradictory_variables_are_an_error_that_shows_them(
    environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        detect_world(environ)
    assert words in str(caught.value)
