"""What is sent. tests/comm/test_paths.py shows that it equals the flat sum on four ranks."""

from __future__ import annotations

import pytest
import torch

from fleetx import StrategyError, fleet
from training import batches, net, sgd, share, train_fleet, zero_last


def sent(dtype):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(
        model, sgd(model), fleet.DistributedStrategy(fp16_allreduce={"dtype": dtype} if dtype else False)
    )
    network = fleet._engine(model).network
    seen, real = [], network.sum
    network.sum = lambda buffer, number=0: (seen.append(buffer.dtype), real(buffer, number))[1]
    for x, y in share(batches(4), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    kept = len(fleet._engine(model).notes["FP16AllReduce"]["buffers"])
    return seen, kept


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_buckets_are_sent_in_half_precision_from_reused_buffers(ranks, dtype):
    for seen, kept in ranks.run(sent, dtype):
        assert set(seen) == {getattr(torch, dtype)}
        assert len(seen) == 4 * kept


def big_gradients():
    fleet.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    strategy = fleet.DistributedStrategy(fp16_allreduce=True, amp={"init_loss_scaling": 2.0**30})
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    zero_last(model, optimizer, *batches(1)[0])
    return fleet.updated


def test_a_gradient_too_large_for_float16_is_an_overflow(ranks):
    assert ranks.run(big_gradients) == [False, False]


def test_an_unknown_dtype():
    with pytest.raises(StrategyError, match="float16"):
        fleet.DistributedStrategy(fp16_allreduce={"dtype": "float8"}).plan()


def test_one_rank_sends_nothing():
    from training import assert_equal, train

    assert_equal(train_fleet(batches(), {"fp16_allreduce": True}), train(batches()))
