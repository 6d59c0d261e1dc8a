"""Worlds of 512 and 4,096 ranks: every strategy is set up and trains, and nothing grows faster than it must."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from wide_child import PER_HOST, STRATEGIES, model

import forked_command

HERE = Path(__file__).parent
PARAMETERS = sum(p.numel() for p in model().parameters())
BUFFERS = sum(b.numel() for b in model().buffers())
FEW, MANY = 512, 4096


@pytest.fixture(scope="module")
def worlds(once):
    return {int(ranks): seen for ranks, seen in once("worlds", _worlds).items()}


def _worlds(folder):
    """What one rank of each world saw."""
    env = os.environ | {"FLEETX_WATCH": "0"}  # there is nobody to watch
    done = forked_command.python([HERE / "wide_child.py", folder, FEW, MANY], cwd=folder, env=env, seconds=400)
    assert done.returncode == 0, done.stderr
    return {n: json.loads((folder / str(n)).read_text()) for n in (FEW, MANY)}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [FEW, MANY])
def test_every_strategy_is_set_up_and_trains(worlds, name, ranks):
    seen = worlds[ranks][name]
    assert "failed" not in seen, seen["failed"]
    assert seen["updated"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_set_up_sends_the_model_once_and_a_hundred_bytes_per_rank(worlds, name):
    for ranks in (FEW, MANY):
        seen = worlds[ranks][name]
        assert seen["setup"]["all_gather"] <= 100 * ranks
        assert seen["setup"]["broadcast"] <= PARAMETERS + 2 * BUFFERS
        assert set(seen["setup"]) == {"all_gather", "broadcast"}
        assert seen["groups"] <= 5


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_work_of_set_up_grows_no_faster_than_the_ranks(worlds, name):
    few, many = (worlds[ranks][name]["calls"] for ranks in (FEW, MANY))
    assert many <= (MANY / FEW) * few * 1.1


# Each rank must hear of every other: its statistics, the values that it has chosen to send, or its share of the mean,
# which is at least a block.
FROM_EVERY_RANK = {"sync_batch_norm": 800, "dgc": 1000, "quantized_allreduce": 270}
FROM_ALL = ("all_gather", "all_to_all")


@pytest.mark.parametrize("name", [n for n in STRATEGIES if "sharding" not in n])
def test_a_step_sends_no_more_in_a_wider_world(worlds, name):
    few, many = (worlds[ranks][name]["step"] for ranks in (FEW, MANY))
    assert {k: v for k, v in few.items() if k not in FROM_ALL} == {k: v for k, v in many.items() if k not in FROM_ALL}
    assert many.get("all_reduce", 0) <= 2 * PARAMETERS
    for ranks, step in ((FEW, few), (MANY, many)):
        assert max(step.get(kind, 0) for kind in FROM_ALL) <= FROM_EVERY_RANK.get(name, 2) * ranks


# Of the shard that a rank holds. Under `muon` whole matrices travel within a host, too.
FROM_EVERY_REPLICA = {"dgc": 310, "quantized_allreduce": 800}


@pytest.mark.parametrize("name", [n for n in STRATEGIES if "sharding on hosts" in n])
def test_between_hosts_a_step_exchanges_shards(worlds, name):
    few, many = (worlds[ranks][name]["step"] for ranks in (FEW, MANY))
    assert {k: v for k, v in few.items() if k not in FROM_ALL} == {k: v for k, v in many.items() if k not in FROM_ALL}
    assert many["reduce_scatter"] == PARAMETERS / PER_HOST
    assert many["all_reduce"] <= 1.1 * PARAMETERS / PER_HOST
    for ranks, step in ((FEW, few), (MANY, many)):
        exchanged = FROM_EVERY_REPLICA.get(name.partition(", ")[2], 0) * ranks / PER_HOST
        assert step["all_gather"] <= 2 * PARAMETERS + 2 * ranks + exchanged
        assert step.get("all_to_all", 0) <= max(exchanged, 2 * PARAMETERS if "muon" in name else 0)
