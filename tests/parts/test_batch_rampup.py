"""gradient_merge with `rampup`: every update equals one plain update with its own batch and its own rate."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn.functional import mse_loss

from fleetx import StrategyError, fleet, schedule
from fleetx.comm.session import current, reset
from training import adamw, assert_close, assert_equal, batches, big, net, sgd, share, weights, with_fleet_backward

RAMP = {"k_steps": 4, "rampup": [[2, 1], [4, 2]]}  # rounds of 1, 1, 2, 2, 4, 4 ... steps
SIZES = [1, 1, 2, 2, 4, 4]
BY_SAMPLES = {**RAMP, "rampup": [[8, 1], [24, 2]], "rampup_unit": "samples", "rampup_feed": 4}  # batches of 4
RULES = {"none": lambda share: 1.0, "linear": lambda share: share, "sqrt": math.sqrt}


def grouped(data, sizes=SIZES):
    out, start = [], 0
    for size in sizes:
        out += big(data[start : start + size], size)
        start += size
    return out


def plain(data, rule="none", optimizer=sgd, rates=None):
    """One plain update per group of batches, at a rate that follows its size."""
    model = net()
    o = optimizer(model)
    for i, ((x, y), size) in enumerate(zip(grouped(data), SIZES, strict=True)):
        base = o.param_groups[0]["lr"] if rates is None else rates[i]
        o.param_groups[0]["lr"] = base * RULES[rule](size / 4)
        mse_loss(model(x), y).backward()
        o.step()
        o.zero_grad()
        o.param_groups[0]["lr"] = base
    return weights(model)


def build(merge, optimizer=sgd, **others):
    reset()
    fleet.init()
    model = net()
    return fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(gradient_merge=merge, **others))


def whole(model):
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in weights(model).items()}


def train_ramped(data, merge, optimizer=sgd, others=()):
    model, o = build(merge, optimizer, **dict(others))
    for x, y in share(data, fleet.worker_index(), fleet.worker_num()):
        with_fleet_backward(model, o, x, y)
    return whole(model)


@pytest.mark.parametrize("merge", [RAMP, BY_SAMPLES], ids=["rounds", "samples"])
@pytest.mark.parametrize(("rule", "optimizer"), [("none", adamw), ("linear", sgd), ("sqrt", adamw)])
def test_every_update_equals_one_with_its_batch_and_rate(merge, rule, optimizer):
    data = batches(14)
    got = train_ramped(data, {**merge, "rampup_lr": rule}, optimizer)
    assert_close(got, plain(data, rule, optimizer))


@pytest.mark.parametrize("others", [{}, {"sharding": {"stage": 3}}, {"amp": {"init_loss_scaling": 64.0}}], ids=str)
@pytest.mark.parametrize(
    "merge", [RAMP, {**BY_SAMPLES, "rampup_feed": 2, "rampup_lr": "sqrt"}], ids=["rounds", "samples"]
)
def test_two_ranks_equal_one(merge, others, ranks):
    data = batches(14)
    for got in ranks.run(train_ramped, data, merge, sgd, others):
        if not others.get("amp"):
            assert_close(got, plain(data, merge.get("rampup_lr", "none")))
        else:
            assert_equal(got, ranks.run(train_ramped, data, merge, sgd, others)[0])


@pytest.mark.parametrize("merge", [RAMP, {**BY_SAMPLES, "rampup_lr": "linear"}], ids=["rounds", "samples"])
def test_a_run_resumes_anywhere_in_the_ramp_bit_for_bit(merge):
    data = batches(14)
    model, o = build(merge, adamw)
    saved = []
    for x, y in data:
        with_fleet_backward(model, o, x, y)
        saved.append((weights(model), copy.deepcopy(o.state_dict())))
    want = weights(model)
    for i in (0, 1, 2, 3, 4, 5, 6, 9, 10):
        again, o2 = build(merge, adamw)
        again.load_state_dict(saved[i][0])
        o2.load_state_dict(saved[i][1])
        for x, y in data[i + 1 :]:
            with_fleet_backward(again, o2, x, y)
        assert_equal(weights(again), want)


def test_a_checkpoint_of_fleet_resumes_in_the_ramp(tmp_path):
    model, o = build({**BY_SAMPLES, "rampup_lr": "sqrt"})
    for i, (x, y) in enumerate(batches(14)):
        with_fleet_backward(model, o, x, y)
        if i == 4:  # inside a window of two
            fleet.save(tmp_path / "saved")
    again, o2 = build({**BY_SAMPLES, "rampup_lr": "sqrt"})
    fleet.load(tmp_path / "saved")
    for x, y in batches(14)[5:]:
        with_fleet_backward(again, o2, x, y)
    assert_equal(weights(again), weights(model))


def test_a_scheduler_sees_the_rate_that_it_has_set_and_can_count_samples():
    """The rate of update i is that of the samples before it, times the share of its batch."""
    data = batches(14)
    model, o = build({**RAMP, "rampup_lr": "linear"})
    scheduler = schedule.large_batch(o, updates=56, warmup=16, decay="linear", by="samples", step_samples=4)
    rates, at = [], []
    for x, y in data:
        mse_loss(model(x), y).backward()
        before = o.param_groups[0]["lr"]
        o.step()
        assert o.param_groups[0]["lr"] == before
        if fleet.updated:
            rates.append(before)
            at.append(scheduler.samples)
        o.zero_grad()
        scheduler.step()
    reference = schedule.large_batch(sgd(net()), updates=14, warmup=4, decay="linear")
    want = []
    for _ in range(14):
        want.append(reference.get_last_lr()[0])
        reference.optimizer.step()
        reference.step()
    last = [0, 1, 3, 5, 9, 13]  # the step that ends each round
    assert rates == pytest.approx([want[i] for i in last])
    assert at == [4 * i for i in last]
    assert_close(weights(model), plain(data, "linear", rates=rates))


def test_the_rate_of_a_step_that_raised_is_restored():
    model, o = build({**RAMP, "rampup_lr": "linear"})
    x, y = batches()[0]
    mse_loss(model(x), y).backward()
    real, o.state = o.state, None  # SGD fails inside its step
    with pytest.raises(TypeError):
        o.step()
    o.state = real
    o.zero_grad()
    with_fleet_backward(model, o, x, y)
    assert o.param_groups[0]["lr"] == 0.1


def test_a_rate_that_is_a_tensor_is_scaled_in_place():
    def tensor_rate(model):
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)

    model, o = build({**RAMP, "rampup_lr": "sqrt"}, tensor_rate)
    rate = o.param_groups[0]["lr"]
    for x, y in batches(14):
        with_fleet_backward(model, o, x, y)
    assert o.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.1)
    assert_close(weights(model), plain(batches(14), "sqrt"))


def test_a_tensor_that_is_the_rate_of_several_groups_is_scaled_once():
    def two_groups(model):
        rate = torch.tensor(0.1)
        halves = [list(model[:2].parameters()), list(model[2:].parameters())]
        return torch.optim.SGD([{"params": half, "lr": rate} for half in halves], momentum=0.9)

    model, o = build({**RAMP, "rampup_lr": "sqrt"}, two_groups)
    for x, y in batches(14):
        with_fleet_backward(model, o, x, y)
    assert [group["lr"].item() for group in o.param_groups] == pytest.approx([0.1, 0.1])
    assert_close(weights(model), plain(batches(14), "sqrt"))


def test_a_window_of_one_step_in_a_ramp_is_plain_pytorch_bit_for_bit():
    data = batches(4)
    assert_equal(train_ramped(data, {"k_steps": 4, "rampup": [[4, 1]]}), train_ramped(data, {"k_steps": 1}))


def test_explain_shows_the_ramp_and_where_it_is():
    model, o = build({**RAMP, "rampup_lr": "sqrt"})
    for x, y in batches(3):
        with_fleet_backward(model, o, x, y)
    text = str(fleet.explain())
    assert "merged steps: 1 until round 2, 2 until round 4, then 4; now 2. The learning rate follows the rule" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rampup": [[4, 2], [2, 1]]}, r"each pair is \(until, steps\); `until` must increase"),
        ({"rampup_lr": "sqrt"}, "rampup_lr has no effect without rampup"),
        ({"rampup": [[4, 2]], "rampup_unit": "samples"}, "needs rampup_feed"),
        ({"rampup": [[4, 2]], "rampup_feed": 3}, "rampup_feed has no effect"),
        ({"rampup": [[4]]}, "rampup"),
        ({"rampup": [[4, 0]]}, "rampup"),
    ],
)
def test_a_mistake_is_an_error_before_training(settings, message):
    with pytest.raises(StrategyError, match=message):
        fleet.DistributedStrategy(gradient_merge={"k_steps": 4, **settings}).plan()


def test_another_number_of_workers_keeps_the_batches_of_the_whole_ramp(tmp_path, ranks):
    ranks.run(save_on_two, tmp_path)
    reset()
    fleet.init()
    made = fleet.keep_batch(fleet.DistributedStrategy(gradient_merge=RAMP), tmp_path)
    assert made.gradient_merge_configs["k_steps"] == 8
    assert made.gradient_merge_configs["rampup"] == [[2, 2], [4, 4]]


def save_on_two(root):
    model, o = build(RAMP)
    for x, y in share(batches(3), fleet.worker_index(), 2):
        with_fleet_backward(model, o, x, y)
    assert current().find(model).round == 2
    fleet.save(root / "step-3")
