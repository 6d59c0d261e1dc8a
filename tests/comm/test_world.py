"""Plain data between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fleetx import fleet
from fleetx.comm.roles import Place
from fleetx.comm.world import World
from training import batches, train_fleet


def _exchange():
    fleet.init()
    world = fleet._here()
    mine = {"rank": world.rank, "text": "ü" * 7 * world.rank, "numbers": [1.5, None, True]}
    return world.gather_json(mine), world.broadcast_json(mine if world.rank == 0 else object())


def test_json_values_of_any_length_reach_every_rank(ranks):
    expected = [{"rank": r, "text": "ü" * 7 * r, "numbers": [1.5, None, True]} for r in range(2)]
    assert ranks.run(_exchange) == [(expected, expected[0])] * 2


def test_json_values_in_a_world_of_one():
    world = World(Place(), torch.device("cpu"))
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
