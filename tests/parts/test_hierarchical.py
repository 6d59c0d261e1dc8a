"""Groups on one host. tests/comm/test_paths.py shows on four ranks that the sums are right."""

from __future__ import annotations

from fleetx import fleet
from training import assert_close, batches, net, sgd, train, train_fleet


def explained():
    fleet.init()
    model = net()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(use_hierarchical_allreduce=True))
    return str(fleet.explain(model=model))


def test_one_host_is_one_group_and_explain_says_that_this_is_the_flat_all_reduce(ranks):
    for text in ranks.run(explained):
        assert "use_hierarchical_allreduce: no effect here: the 2 ranks are one group" in text


def test_the_result_is_still_right(ranks):
    for got in ranks.run(train_fleet, batches(), {"use_hierarchical_allreduce": True}):
        assert_close(got, train(batches()))
