"""The environment of launchers, and what is wrong with it when it is."""

from __future__ import annotations

import pytest

from fleetx import WorldError
from fleetx.comm.roles import PaddleCloudRoleMaker, ProcessInfo, UserDefinedRoleMaker, first_host, from_environment
from fleetx.fleet.base import role_maker

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
ENDS = "10.0.0.1:6070,10.0.0.1:6071,10.0.0.2:6070,10.0.0.2:6071"
PADDLE = {
    "PADDLE_TRAINER_ID": "3",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_TRAINER_ENDPOINTS": ENDS,
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6071",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "4242",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "24001",
    "MASTER_ADDR": "a",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "a",
}


@pytest.mark.parametrize(
    "env", [TORCH, PADDLE, SLURM, OPEN_MPI, MPICH], ids=["torchrun", "paddle", "slurm", "open mpi", "mpich"]
)
def test_each_launcher_is_understood(env):
    place = from_environment(env)
    assert (place.rank, place.size, place.local_rank, place.launched) == (3, 4, 1, True)
    assert len(place.endpoints) == 4


def test_where_the_workers_meet():
    assert from_environment(TORCH).master == ""  # torch's own variables say
    assert from_environment(PADDLE).master == "10.0.0.1:6070"
    assert from_environment(SLURM).master == "gpu07:24242"
    assert from_environment(SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}).master == "a:5"
    assert from_environment(OPEN_MPI).master == "a:24001"
    assert from_environment(MPICH).master == "a:29500"
    one_machine = {k: v for k, v in MPICH.items() if k != "MASTER_ADDR"} | {"MPI_LOCALNRANKS": "4"}
    assert from_environment(one_machine).master == "127.0.0.1:29500"


@pytest.mark.parametrize("env", [OPEN_MPI, MPICH], ids=["open mpi", "mpich"])
def test_mpirun_inside_of_a_step_of_slurm_has_the_ranks(env):
    """In `srun --pty bash`, or on a machine where mpirun has started its daemon with srun."""
    step = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    assert from_environment(step | env) == from_environment(env)


def test_the_variables_that_srun_sets_for_mpi_change_nothing():
    assert from_environment(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}) == from_environment(SLURM)


@pytest.mark.parametrize("env", [OPEN_MPI, MPICH], ids=["open mpi", "mpich"])
def test_mpi_on_several_machines_needs_the_address_of_the_first(env):
    with pytest.raises(WorldError, match="4 workers on several machines: pass the address of the first one"):
        from_environment({k: v for k, v in env.items() if k != "MASTER_ADDR"})


def test_no_launcher_means_a_world_of_one():
    assert from_environment({}) == ProcessInfo()
    assert not from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).launched  # inside of a job, not of srun
    assert not from_environment({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"}).launched


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (TORCH | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be at least 1"),
        (TORCH | {"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1: must be at least 1"),
        (TORCH | {"MASTER_PORT": "0"}, "MASTER_PORT=0: must be a port from 1 to 65535"),
        (TORCH | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be a port from 1 to 65535"),
        (TORCH | {"MASTER_PORT": "x"}, "MASTER_PORT=x: must be a whole number"),
        (TORCH | {"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc: must be a whole number"),
        (TORCH | {"RANK": "4"}, "RANK=4: must be from 0 to 3, because WORLD_SIZE=4"),
        (TORCH | {"LOCAL_RANK": "-3"}, "LOCAL_RANK=-3: must be from 0 to 3"),
        (TORCH | {"RANK": "-1"}, "RANK=-1: must be from 0 to 3"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "incomplete: MASTER_ADDR and MASTER_PORT are missing. Start"),
        ({"WORLD_SIZE": "4"}, "incomplete: RANK and MASTER_ADDR and MASTER_PORT are missing"),
        (PADDLE | {"PADDLE_TRAINERS_NUM": "5"}, "lists 4 addresses, but PADDLE_TRAINERS_NUM=5"),
        (PADDLE | {"PADDLE_CURRENT_ENDPOINT": "x:1"}, "is not number 3 of PADDLE_TRAINER_ENDPOINTS"),
        ({"PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINERS_NUM is not"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "set MASTER_ADDR"),
    ],
)
def test_a_broken_environment_is_refused_by_variable_and_value(env, message):
    with pytest.raises(WorldError, match=message):
        from_environment(env)


@pytest.mark.parametrize(
    ("nodes", "host"), [("a1", "a1"), ("a[3-5]", "a3"), ("a[03,07]", "a03"), ("x-1,y-2", "x-1"), ("n[1]-ib", "n1")]
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes).startswith(host)


def test_a_user_may_tell_the_place():
    ends = ["a:1", "b:1", "b:2"]
    place = UserDefinedRoleMaker(is_collective=True, current_id=2, worker_num=3, worker_endpoints=ends).process()
    assert place == ProcessInfo(2, 3, 1, ("a:1", "b:1", "b:2"), "a:1", launched=True)
    assert UserDefinedRoleMaker(is_collective=True).process() == ProcessInfo()
    with pytest.raises(WorldError, match="current_id=3"):
        UserDefinedRoleMaker(current_id=3, worker_num=3, worker_endpoints=ends).process()
    with pytest.raises(WorldError, match="lists 3 addresses for worker_num=4"):
        UserDefinedRoleMaker(current_id=0, worker_num=4, worker_endpoints=ends).process()


def test_paddles_place_for_the_role_makers():
    assert role_maker.PaddleCloudRoleMaker is PaddleCloudRoleMaker
    assert role_maker.UserDefinedRoleMaker is UserDefinedRoleMaker
