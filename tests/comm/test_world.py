"""Plain data between ranks."""

from __future__ import annotations

import pytest
import torch

from fleetx import fleet
from fleetx.comm.roles import Place
from fleetx.comm.world import World


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
