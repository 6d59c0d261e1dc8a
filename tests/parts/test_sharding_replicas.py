"""Strategies that act between the replicas of shards: two groups of two ranks, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import wires
from fleetx import StrategyError, fleet
from training import batches, net, share

SHARDED = {"sharding": {"sharding_degree": 2, "hybrid_dp": True}}
BY_NAME = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["0", "2"]}
SEGMENTS = {"sharding": {"sharding_degree": 2, "hybrid_dp": True, "stage": 3, **BY_NAME}}
HALF = {"fp16_allreduce": True}


def near(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def whole(model):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in model.state_dict().items()}


def build(declared, make=wires.double_net, optimizer=wires.plain_sgd):
    fleet.init()
    model = make()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))


def trained(data, declared, make=wires.double_net, optimizer=wires.plain_sgd):
    model, o = build(declared, make, optimizer)
    dtype = next(model.parameters()).dtype
    for x, y in share(data, fleet.worker_index(), fleet.worker_num()):
        fleet.backward(mse_loss(model(x.to(dtype)), y.to(dtype)), optimizer=o)
        o.step()
        o.zero_grad()
    return whole(model)


# --- nothing is coded -----------------------------------------------------------------------------
@pytest.mark.parametrize("sharded", [SHARDED, SEGMENTS], ids=["one segment", "three segments"])
@pytest.mark.parametrize(
    "declared", [{}, {"nccl_comm_num": 2}, {"use_hierarchical_allreduce": True}, {"clip": {"clip_norm": 1e9}}], ids=str
)
def test_at_neutral_settings_it_is_data_parallelism(four, declared, sharded):
    for got in four.run(trained, batches(), sharded | declared):
        near(got, wires.data_parallel(batches(), 1))


def merged(steps):
    """Rounds of three steps, and the last of the rest."""
    model, o = build(SHARDED | {"gradient_merge": {"k_steps": 3}})
    sent = []
    for x, y in share(batches(steps), fleet.worker_index(), 4):
        mse_loss(model(x.double()), y.double()).backward()
        o.step()
        o.zero_grad()
        sent.append(fleet._engine(model).network.traffic.sent)
    fleet.flush()
    return whole(model), sent


def test_replicas_reduce_once_per_round_also_one_that_a_flush_ends(four):
    model = wires.double_net()
    o = wires.plain_sgd(model)
    data = batches(8)
    for window in (data[:3], data[3:6], data[6:]):
        for x, y in window:
            (mse_loss(model(x.double()), y.double()) / len(window)).backward()
        o.step()
        o.zero_grad()
    for got, sent in four.run(merged, 8):
        near(got, model.state_dict())
        assert sent[:2] == [0, 0]
        assert sent[2:8] == [sent[2]] * 3 + [2 * sent[2]] * 3


def twice(data):
    """Two backwards before each step, and a loss that reads a weight itself."""
    model, o = build(SEGMENTS)
    for x, y in share(data, fleet.worker_index(), 4):
        for half in (0, 1):
            loss = mse_loss(model(x[half : half + 1].double()), y[half : half + 1].double())
            penalty = model[2].weight.full_tensor().square().sum()
            fleet.backward((loss + 0.1 * penalty * (1 + fleet.worker_index())) / 2, optimizer=o)
        o.step()
        o.zero_grad()
    return whole(model)


def test_several_backwards_and_a_loss_that_reads_a_weight(four):
    """The ranks weigh the penalty 1 to 4 times."""
    data = batches(4, 8)
    model = wires.double_net()
    o = wires.plain_sgd(model)
    for x, y in data:
        (mse_loss(model(x.double()), y.double()) + 0.25 * model[2].weight.square().sum()).backward()
        o.step()
        o.zero_grad()
    for got in four.run(twice, data):
        near(got, model.state_dict())


# --- codes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("sharded", [SHARDED, SEGMENTS], ids=["one segment", "three segments"])
def test_half_precision_between_replicas_equals_a_simulation(four, sharded):
    simulated = wires.data_parallel(batches(), 2, wires.Half())
    for got in four.run(trained, batches(), sharded | HALF):
        near(got, simulated)


def large():
    torch.manual_seed(0)
    return nn.Linear(600, 400)


def sent(declared):
    model, o = build(declared, large)
    for _ in range(5):
        model(torch.randn(2, 600)).sum().backward()
        o.step()
        o.zero_grad()
    return fleet._engine(model).network.traffic.sent


@pytest.mark.parametrize(("declared", "rounds", "bytes_per_value"), [({}, 5, 4), (HALF, 5, 2)])
def test_the_bytes_between_replicas_are_those_of_a_shard(four, declared, rounds, bytes_per_value):
    """A ring of two ranks sends a buffer once."""
    for got in four.run(sent, SHARDED | declared):
        assert got == pytest.approx(rounds * (600 * 400 + 400) / 2 * bytes_per_value, rel=0.02)


# --- errors ---------------------------------------------------------------------------------------
def refused(declared):
    try:
        build(declared, net)
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("declared", [HALF, {"nccl_comm_num": 2}, {"use_hierarchical_allreduce": True}], ids=str)
def test_without_replicas_there_is_nothing_to_act_on(four, declared):
    for message in four.run(refused, {"sharding": True} | declared):
        assert "acts between replicas of the model, but `sharding` divides the only one between all 4 ranks" in message
        assert "set a smaller sharding_degree, and hybrid_dp=True, or turn one of them off" in message


def released(declared):
    model, o = build(declared)
    for x, y in share(batches(3), fleet.worker_index(), 4):
        fleet.backward(mse_loss(model(x.double()), y.double()), optimizer=o)
        o.step()
        o.zero_grad()
    model, o = fleet.release(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    if fleet.worker_index() == 0:  # alone: nothing is sent any more
        mse_loss(model(torch.ones(2, 6).double()), torch.ones(2, 3).double()).backward()
        o.step()
    return before, type(model).__name__, [type(p).__name__ for p in model.parameters()]


@pytest.mark.parametrize("declared", [HALF], ids=str)
def test_release_leaves_a_plain_model_without_hooks(four, declared):
    results = four.run(released, SEGMENTS | declared)
    for before, kind, params in results:
        torch.testing.assert_close(before, results[0][0], rtol=0, atol=0)
        assert (kind, set(params)) == ("Sequential", {"Parameter"})
