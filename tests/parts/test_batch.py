"""batch: how the batch of an update is split, declared in the strategy and checked in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetx import DistributedStrategy, StrategyError, UsageError, fleet
from training import assert_equal, batches, train, train_fleet

SPLIT = {"feed": 16, "merged": 3, "replicas": 1}


def distributed(**declared):
    fleet.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fleet.distribute(model, optimizer, DistributedStrategy(**declared))


def data(n):
    return torch.randn(n, 4), torch.randint(0, 2, (n,))


def test_it_does_not_change_training():
    (x, _), *_ = batches()
    assert_equal(train_fleet(batches(), {"batch": {"feed": len(x)}}), train(batches()))


def test_the_split_is_returned_by_fleet_batch():
    distributed(batch=SPLIT, gradient_merge={"k_steps": 3})
    batch = fleet.batch()
    assert (batch.feed, batch.merged, batch.replicas, batch.total) == (16, 3, 1, 48)
    assert str(batch) == "batch: 48 = 16 samples per step x 3 merged x 1 replicas"


def test_without_auto_or_batch_there_is_no_split():
    distributed()
    with pytest.raises(UsageError, match="needs a strategy with auto or batch"):
        fleet.batch()


def test_it_survives_yaml_in_both_forms(tmp_path):
    strategy = DistributedStrategy(batch=SPLIT)
    strategy.save(tmp_path / "saved.yaml")
    (tmp_path / "short.yaml").write_text("batch: {feed: 16, merged: 3, replicas: 1}\n")
    assert DistributedStrategy.load(tmp_path / "saved.yaml") == strategy
    assert DistributedStrategy.load(tmp_path / "short.yaml") == strategy


def test_a_batch_of_another_size_is_an_error():
    model, optimizer = distributed(batch=SPLIT, gradient_merge={"k_steps": 3})
    for n in (8, 48):
        with pytest.raises(UsageError, match=f"a batch of {n} samples, but the plan is 16 per step"):
            model(data(n)[0])
    for n in (16, 3):  # the last batch of the data may be smaller
        x, y = data(n)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        assert model(data(64)[0]).shape == (64, 2), "evaluation may use any batch"


def test_a_split_that_does_not_match_the_strategy_or_the_world_is_an_error():
    with pytest.raises(StrategyError) as caught:
        distributed(batch={"feed": 16, "merged": 3, "replicas": 2}, gradient_merge={"k_steps": 2})
    merged, replicas = caught.value.problems
    assert "batch_configs['merged'] = 3, but the strategy merges 2 steps" in merged
    assert "batch_configs['replicas'] = 2, but this run has 1: start as many ranks" in replicas
    with pytest.raises(StrategyError, match=r"batch_configs: feed is not set"):
        distributed(batch=True)


def _replicas(declared):
    try:
        distributed(**declared)
    except StrategyError as error:
        return str(error)
    return fleet.batch().replicas


def test_the_stages_of_a_pipeline_are_one_replica(ranks):
    pipeline = {"pipeline": {"degree": 2, "accumulate_steps": 2}}
    assert ranks.run(_replicas, {"batch": {"feed": 8, "replicas": 2}}) == [2, 2]
    assert ranks.run(_replicas, {"batch": {"feed": 8, "replicas": 1}} | pipeline) == [1, 1]
    for error in ranks.run(_replicas, {"batch": {"feed": 8, "replicas": 2}} | pipeline):
        assert "batch_configs['replicas'] = 2, but this run has 1" in error
