"""What is said about the groups. That the sums are right is in tests/test_routes.py, on four ranks."""

from __future__ import annotations

from fleetx import fleet
from training import assert_close, batches, net, sgd, train, train_fleet


def told():
    fleet.init()
    model = net()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(use_hierarchical_allreduce=True))
    return str(fleet.explain(model=model))


def test_one_host_is_one_group_and_explain_says_that_it_gains_nothing(ranks):
    for text in ranks.run(told):
        assert "use_hierarchical_allreduce: all 2 ranks are in one group" in text


def test_it_is_right_nevertheless(ranks):
    for got in ranks.run(train_fleet, batches(), {"use_hierarchical_allreduce": True}):
        assert_close(got, train(batches()))
