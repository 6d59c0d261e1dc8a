"""Groups on one host. tests/comm/test_paths.py shows on four ranks that the sums are right."""

from __future__ import annotations

from fleetx import fleet
from training import assert_close, batches, net, sgd, train, train_fleet


def explained():
    fleet.init()
    model = net()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(use_hierarchical_allreduce=True))
    return str(fleet.explain(model=model))


def test_one_host_is_one_group_and_explain_recommends_a_flat_all_reduce(ranks):
    for text in ranks.run(explained):
        assert "use_hierarchical_allreduce: all 2 ranks are in one group" in text


def test_the_result_is_still_right(ranks):
    for got in ranks.run(train_fleet, batches(), {"use_hierarchical_allreduce": True}):
        assert_close(got, train(batches()))
