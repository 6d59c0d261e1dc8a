"""The recorded ratios are those of the formulas, on every implementation, and under a strategy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import mse_loss

from fleetx import UsageError, fleet, optim
from fleetx.comm.session import reset
from training import adam, assert_equal, batches, net, sgd, share, weights, with_fleet_backward


def lars(model, **options):
    return optim.Lars(model.named_parameters(), lr=0.1, exclude_from_weight_decay=["bias"], **options)


def lamb(model, **options):
    return optim.Lamb(model.named_parameters(), lr=0.1, exclude_from_weight_decay=["bias"], **options)


def gradients(model):
    x, y = batches()[0]
    mse_loss(model(x.to(next(model.parameters()).dtype)), y.to(next(model.parameters()).dtype)).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "foreach"])
def test_lars_records_its_formula(dtype):
    model = net().to(dtype)
    o = lars(model)
    gradients(model)
    want = {
        name: torch.Tensor.item(0.001 * p.norm() / (p.grad.norm() + 5e-4 * p.norm()))
        for name, p in model.named_parameters()
        if "weight" in name
    }
    with optim.TrustRatios(o) as ratios:
        o.step()
    assert ratios.values() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "foreach"])
def test_lamb_records_the_ratio_that_it_used(dtype):
    model = net().to(dtype)
    o = lamb(model)
    gradients(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with optim.TrustRatios(o) as ratios:
        o.step()
    found = ratios.values()
    assert set(found) == {name for name in before if "weight" in name}
    for name, p in model.named_parameters():
        if name in found:  # the step is lr * r * u with r |u| = |p|, so |u| = |p| / r
            u = p.grad.sign() + 0.01 * before[name]  # the first step of Adam
            assert found[name] == pytest.approx(float(before[name].norm() / u.norm()), rel=1e-3)


@pytest.mark.parametrize("make", [lars, lamb])
def test_recording_does_not_change_training(make):
    plain, recorded = net(), net()
    a, b = make(plain), make(recorded)
    with optim.TrustRatios(b) as ratios:
        for _ in range(5):
            for model, o in ((plain, a), (recorded, b)):
                o.zero_grad()
                gradients(model)
                o.step()
    torch.testing.assert_close(weights(plain), weights(recorded), rtol=1e-6, atol=1e-7)
    assert sum(n for _, _, n in ratios.histogram()) == 3
    assert "trust ratios of the last update" in str(ratios)
    assert b.recorder is None
    copy.deepcopy(b)


def test_the_histogram_counts_powers_of_two():
    model = net()
    o = lars(model)
    gradients(model)
    with optim.TrustRatios(o) as ratios:
        assert "no tensor was adapted yet" in str(ratios)
        o.step()
    values = list(ratios.values().values())
    for low, high, n in ratios.histogram():
        assert n == sum(low <= value < high for value in values)


def recorded(declared, optimizer):
    reset()
    fleet.init()
    model = net()
    model, o = fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**declared))
    ratios = fleet.trust_ratios()
    for x, y in share(batches(4), fleet.worker_index(), fleet.worker_num()):
        with_fleet_backward(model, o, x, y)
    found = ratios.values()
    fleet.release()
    assert "recorder" not in vars(o)
    return found


@pytest.mark.parametrize(("switch", "optimizer"), [("lars", sgd), ("lamb", adam)])
def test_two_ranks_and_shards_record_the_ratios_of_whole_tensors(switch, optimizer, ranks):
    want = recorded({switch: True}, optimizer)
    assert len(want) == 6 if switch == "lamb" else want
    for declared in ({switch: True}, {switch: True, "sharding": {"stage": 3}}):
        for got in ranks.run(recorded, declared, optimizer):
            assert got == pytest.approx(want, rel=1e-4)


def test_without_lars_or_lamb_there_are_none():
    reset()
    fleet.init()
    model = net()
    fleet.distribute(model, sgd(model), fleet.DistributedStrategy())
    with pytest.raises(UsageError, match=r"turn strategy\.lars or strategy\.lamb on"):
        fleet.trust_ratios()
    with pytest.raises(TypeError, match="only Lars and Lamb"):
        optim.TrustRatios(sgd(net()))
    assert_equal(weights(model), weights(net()))
