"""Plain data between ranks."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fleetx import WorldError, fleet
from fleetx.comm.join import _check_address, enter
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.session import current
from fleetx.comm.world import World
from training import batches, train_fleet


def _exchange():
    fleet.init()
    world = current().here()
    mine = {"rank": world.rank, "text": "ü" * 7 * world.rank, "numbers": [1.5, None, True]}
    return world.gather_json(mine), world.broadcast_json(mine if world.rank == 0 else object())


def test_json_values_of_any_length_reach_every_rank(ranks):
    expected = [{"rank": r, "text": "ü" * 7 * r, "numbers": [1.5, None, True]} for r in range(2)]
    assert ranks.run(_exchange) == [(expected, expected[0])] * 2


def test_json_values_in_a_world_of_one():
    world = World(ProcessInfo(), torch.device("cpu"))
    assert world.gather_json([1, "a"]) == [[1, "a"]]
    assert world.broadcast_json({"a": []}) == {"a": []}
    with pytest.raises(TypeError, match="not JSON serializable"):
        world.gather_json(object())


def test_groups_of_models_that_are_gone_are_destroyed(ranks):
    for counts in ranks.run(_groups_over_time):
        assert counts == counts[:1] * 4


def _groups_over_time():
    counts = []
    for _ in range(4):
        train_fleet(batches(2), {"nccl_comm_num": 2, "localsgd": True})
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


@pytest.mark.parametrize(
    "variable", ["PET_NNODES=2", "SKYPILOT_NUM_NODES=4", 'SM_HOSTS=["algo-1", "algo-2"]'], ids=lambda v: v.split("=")[0]
)
def test_a_worker_that_no_launcher_started_says_that_it_trains_alone(variable):
    """Otherwise each node of a TrainJob would train a model of its own."""
    name, value = variable.split("=")
    with pytest.warns(UserWarning, match=f"{name}=.*, but this worker trains alone: start it with `fleetrun"):
        enter(ProcessInfo(), env={name: value})


@pytest.mark.parametrize("env", [{"PET_NNODES": "1"}, {"SM_HOSTS": '["algo-1"]'}, {}])
def test_one_node_is_trained_on_alone(env):
    enter(ProcessInfo(), env=env)


# --- addresses ------------------------------------------------------------------------------------
def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_loopback_address_in_a_job_of_several_machines_is_named():
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(
        WorldError, match=r"127.0.0.1, makes every machine connect to itself.*only 1 of 2 ranks are on this"
    ):
        _check_address(ProcessInfo(1, 2, launched=True), env, patience=0.5)
    _check_address(ProcessInfo(1, 2, launched=True), env | {"LOCAL_WORLD_SIZE": "2"})  # all ranks are here


def test_several_launchers_may_share_a_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "LOCAL_WORLD_SIZE": "1"}
        _check_address(ProcessInfo(1, 2, launched=True), env, patience=0.5)


def test_an_address_that_does_not_resolve_is_named():
    env = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "1"}
    with pytest.raises(WorldError, match=r"'no-such-host.invalid', does not resolve"):
        _check_address(ProcessInfo(1, 2, launched=True), env)


def test_a_port_in_use_is_named():
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        place = ProcessInfo(0, 2, master=f"127.0.0.1:{port}", launched=True)
        with pytest.raises(WorldError, match=rf"cannot listen at 127.0.0.1:{port}: the port is in use"):
            enter(place, timeout=timedelta(seconds=5))
