"""n ranks equal one, reduction overlaps with backward, and evaluation does not communicate."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fleetx import fleet
from fleetx.comm.session import current
from fleetx.engine.engine import Engine
from fleetx.parts.data_parallel import DataParallel
from fleetx.strategy.compose import compose
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Stage, at
from training import adamw, assert_close, assert_equal, batches, net, sgd, share, train, train_fleet, weights, zero_last


@pytest.mark.parametrize(
    ("fuse", "optimizer"),
    [({}, sgd), ({"fuse_all_reduce_ops": False}, adamw), ({"fuse_grad_size_in_MB": 0.001}, sgd)],
    ids=["defaults", "unfused", "small buckets"],
)
def test_two_ranks_equal_one(ranks, fuse, optimizer):
    found = ranks.run(_train, batches(), fuse, optimizer)
    assert_equal(found[0], found[1])
    assert_close(found[0], train(batches(), optimizer=optimizer))


def _train(data, declared, optimizer):
    return train_fleet(data, declared, optimizer=optimizer)


def test_it_equals_distributed_data_parallel_bit_for_bit(ranks):
    for ours, theirs in ranks.run(_with_and_without_ddp):
        assert_equal(ours, theirs)


def _with_and_without_ddp():
    ours = train_fleet(batches(), {})
    model = net()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(ddp)
    for x, y in share(batches(), dist.get_rank(), 2):
        zero_last(ddp, optimizer, x, y)
    return ours, weights(model)


def test_ranks_with_different_weights_take_those_of_rank_0(ranks):
    found = ranks.run(_different_weights)
    assert_equal(found[0], found[1])


def _different_weights():
    fleet.init()
    torch.manual_seed(fleet.worker_index())
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    fleet.distribute(model, sgd(model))
    return weights(model)


def test_without_fusion_each_parameter_is_reduced_separately(ranks):
    assert ranks.run(_reductions, {"fuse_all_reduce_ops": False}) == [6, 6]
    assert ranks.run(_reductions, {}) == [1, 1]


def _reductions(declared):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    zero_last(model, optimizer, *batches(1)[0])  # buckets are rebuilt after the first step
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        zero_last(model, optimizer, *batches(1)[0])
    return sum(e.name == "gloo:all_reduce" for e in seen.events())


@settings
class Dense(Part):
    """The plain mean, which records when it is called."""

    @at(Stage.WIRE)
    def reduce(self, bucket, ctx):
        EVENTS.append("reduce " + " ".join(bucket.names))
        return bucket.network.mean(bucket.buffer, bucket.index)


EVENTS = []


def test_reduction_begins_before_backward_has_reached_the_first_layer(ranks):
    """By the order of events: the first bucket is sent before the gradient of the first layer exists."""
    for events, ours, dense in ranks.run(_events):
        assert events == ["reduce 4.bias 4.weight 2.bias 2.weight", "first layer", "reduce 0.bias 0.weight"]
        assert_equal(ours, dense)


def _events():
    """With a part at the WIRE stage; the result equals that of the default."""
    fleet.init()
    model = net()
    plan = compose([DataParallel(fuse_grad_size_in_MB=0.0005), Dense()])
    optimizer = Engine(plan, model, sgd(model), current().here()).optimizer
    model[0].weight.register_hook(lambda grad: EVENTS.append("first layer"))
    for x, y in share(batches(), fleet.worker_index(), 2):
        EVENTS.clear()  # buckets are rebuilt after the first step
        zero_last(model, optimizer, x, y)
    return list(EVENTS), weights(model), train_fleet(batches(), {})


def test_buffers_equal_those_of_rank_0_after_every_round(ranks):
    for ours, theirs in zip(*ranks.run(_buffers), strict=True):
        assert torch.equal(ours, theirs)


def _buffers():
    fleet.init()
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model, optimizer = fleet.distribute(model, sgd(model))
    for x, y in share(batches(), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
    return list(model.buffers())


def test_evaluation_on_one_rank_alone_does_not_hang(ranks):
    assert ranks.run(_evaluate_alone) == [True, True]


def _evaluate_alone():
    fleet.init()
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model, optimizer = fleet.distribute(model, sgd(model))
    for x, y in share(batches(), fleet.worker_index(), 2):
        zero_last(model, optimizer, x, y)
        if fleet.is_first_worker():
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    return True


def test_several_forwards_before_one_backward_work_even_with_batchnorm(ranks):
    assert_equal(*ranks.run(_two_forwards))


def _two_forwards():
    fleet.init()
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model, optimizer = fleet.distribute(model, sgd(model))
    for (x, y), (a, b) in zip(*[iter(share(batches(), fleet.worker_index(), 2))] * 2, strict=True):
        loss = torch.nn.functional.mse_loss(model(x), y) + torch.nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


class Optional(nn.Module):
    """Uses one of its branches, chosen by the caller."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, *, branch):
        return (self.a if branch == 0 else self.b)(x)


def test_find_unused_parameters(ranks):
    assert_equal(*ranks.run(_branches, 1))
    assert_equal(*ranks.run(_branches, 2))  # withheld, put back, and used on one rank only


def _branches(k):
    fleet.init()
    model = Optional()
    declared = {"find_unused_parameters": True, "gradient_merge": {"k_steps": k}}
    model, optimizer = fleet.distribute(model, adamw(model), fleet.DistributedStrategy(**declared))
    for i, (x, y) in enumerate(batches(7)):
        out = model(x, branch=(i + fleet.worker_index()) % 2)
        torch.nn.functional.mse_loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.flush()
    return weights(model)
